"""A tiny checkpoint on the engine and in transformers, and what a suite states of it."""

import gc
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp.testing.checkpoint import Checkpoint
from nnterp.testing.comparing import MASKED
from nnterp.testing.facts import ROOT_VALUES, Facts, _checkpoints

#: How far two implementations of the same float32 arithmetic may be apart, as a part of the largest value.
APART = 1e-4

#: Read-only on the engine.
RECOMPUTED = ("self_attn.attention_scores", "self_attn.attention_probabilities")

#: What no family has on the engine.
NEVER = {"attention_mask": "no mask", "lm_head_output": "never calls lm_head"}


def assert_near(actual: Tensor, expected: Tensor, apart: float = APART) -> None:
    """``actual`` is ``expected`` to ``apart`` of its largest value; the same entries are masked."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    masked = expected.abs() > MASKED
    assert torch.equal(actual.abs() > MASKED, masked), "other entries are masked"
    actual, expected = actual.double().masked_fill(masked, 0), expected.double().masked_fill(masked, 0)
    allowed, off = apart * expected.abs().max().item(), (actual - expected).abs().max().item()
    assert off <= allowed, f"off by {off:.3g}, allowed are {allowed:.3g}"


def requests_in_this_step(value) -> int:
    """How many requests the engine runs in the step whose ``value`` was just read."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    metadata = next(iter(metadata.values())) if isinstance(metadata, dict) else metadata
    if hasattr(metadata, "seq_lens"):
        return len(metadata.seq_lens)
    return metadata.num_prefills + metadata.num_decodes


def keep_buildable(inits: dict[type, Callable]) -> None:
    """Have transformers build models of these classes still, each with its constructor from before the engine.

    vLLM's transformers backend makes a class compiled by changing it in place; built outside an engine it then asks for
    the engine's config.
    """
    from vllm.config import get_current_vllm_config_or_none

    for kind, plain in inits.items():
        changed = kind.__init__
        if changed is plain:
            continue

        def __init__(self: Any, *args: Any, _plain=plain, _changed=changed, **kwargs: Any) -> None:
            if get_current_vllm_config_or_none() is not None:
                return _changed(self, *args, **kwargs)
            _plain(self, *args, **kwargs)
            self.do_not_compile = True

        kind.__init__ = __init__


class EngineCheckpoint(Checkpoint):
    """One row of tokens, on an engine."""

    def __init__(self, suite: Any, layout: str, directory: Any) -> None:
        super().__init__(suite, layout, directory)
        self.ids = self.ids[:1]
        self.engine_options = suite.ENGINE
        self.read: dict[tuple[str, int | None], Tensor] = {}

    def load(self, dispatch: bool = True, **options: Any) -> Any:
        from nnterp_vllm import StandardizedVLLM

        limits = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
        inits = {type(module): type(module).__init__ for module in self.bare.modules()}
        options = {**limits, **self.engine_options, **options}
        model = StandardizedVLLM(str(self.directory), dispatch=dispatch, **options)
        keep_buildable(inits)
        for module in self.bare.modules():  # built before its class was changed
            if not hasattr(module, "do_not_compile"):
                module.do_not_compile = True
        return model

    @cached_property
    def model(self) -> Any:
        return self.load()

    def close(self) -> None:
        """End the engine; the next one needs its place."""
        model = self.__dict__.pop("model", None)
        if model is not None:
            model.vllm_entrypoint.llm_engine.engine_core.shutdown()
        self.__dict__.pop("bare", None)


class EngineFacts(Facts):
    """`nnterp.testing`'s facts, where the engine differs.

    Attributes:
        ENGINE: More keyword arguments for vLLM.
        SIZES: The model's sizes by name, those of a block's modules as ``"self_attn.num_heads"``.
        OTHERWISE_UNAVAILABLE: Values of the root that this family has not, beside `NEVER`.
        UNEDITED: Values that are compared and not edited.
    """

    CHECKPOINT = EngineCheckpoint
    ENGINE: dict[str, Any] = {}
    SIZES: dict[str, int] = {}
    OTHERWISE_UNAVAILABLE: dict[str, str] = {}
    UNEDITED: tuple[str, ...] = ()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def engine_of_the_class(cls) -> Iterator[None]:
        """One engine at a time."""
        yield
        for (suite, _), checkpoint in _checkpoints.items():
            if suite is cls:
                checkpoint.close()
        gc.collect()

    @classmethod
    def has(cls, layout: str, value: str) -> bool:
        return value not in {**NEVER, **cls.OTHERWISE_UNAVAILABLE} and super().has(layout, value)

    @classmethod
    def all_values(cls) -> list[str]:
        """Every value that the kit knows a place of in the bare model."""
        found = super().all_values()
        return [value for value in found if value in cls.SITES or cls._plain(value)]

    @classmethod
    def _plain(cls, value: str) -> bool:
        try:
            cls.where(cls, value)
        except KeyError:
            return False
        return True

    @property
    def prompt(self) -> list[int]:
        """The tokens of `ids`, as a request takes them."""
        return self.ids[0].tolist()

    def layers_of_value(self, value: str) -> list[int | None]:
        return [None] if value in ROOT_VALUES else [layer for layer in self.blocks if self.on(value, layer)]

    def read(self, value: str, prompt: list[int] | None = None) -> list[Tensor]:
        """A value of every block that has it, through the engine."""
        name = value.rpartition(".")[2]
        hosts = [self.host(value, layer)[0] for layer in self.layers_of_value(value)]
        model = self.model
        with model.trace(prompt or self.prompt, max_tokens=1, temperature=0.0):
            found = [].save()
            for host in hosts:
                found.append(getattr(host, name))
        return found

    @cached_property
    def clean(self) -> Tensor:
        """The engine's logits of `prompt`, ``[vocab_size]``."""
        return self.engine_logits()

    def engine_logits(self) -> Tensor:
        model = self.model
        with model.trace(self.prompt, max_tokens=1, temperature=0.0):
            logits = model.logits.save()
        return logits[0, -1]

    def bare_logits(self, ids: list[int] | None = None) -> Tensor:
        """transformers' logits of every position of `prompt`, or of ``ids``."""
        return self.bare(input_ids=torch.tensor([ids or self.prompt])).logits[0].detach()
