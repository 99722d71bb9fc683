"""What an engine on a machine without a GPU needs before it is built."""

from typing import Any

import torch

#: The worker of an engine on the CPU, by import path.
CPU_WORKER = "nnterp_vllm.cpu.Worker"


def on_cpu() -> bool:
    """Whether the installed vLLM is one for CPUs."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def through_transformers(repo_id: str, kwargs: dict[str, Any]) -> bool:
    """Whether vLLM runs this checkpoint through transformers' modules: it has no implementation of its own for it, or
    is told to (``model_impl="transformers"``).
    """
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    options = {name: value for name, value in kwargs.items() if name in known}
    return EngineArgs(model=repo_id, **options).create_model_config().using_transformers_backend()


def prepare_cpu() -> None:
    """Let the tree of a model be built without an accelerator and without weights.

    vLLM's loader asks for an accelerator's stream, and packs the weights of a mixture by an operation that has no
    implementation on the meta device (vLLM 0.32).
    """
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    name = "prepack_moe_weight"
    if hasattr(torch.ops._C, name) and f"_C::{name}" not in _faked:
        _faked.add(f"_C::{name}")
        torch.library.register_fake(f"_C::{name}")(lambda *args, **kwargs: None)


_faked: set[str] = set()
