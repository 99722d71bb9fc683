"""What reading costs in memory: a value is the model's own tensor, so nothing but what is kept alive."""

from collections.abc import Callable
from typing import Any

import nnsight
import torch
from measure import Row
from subjects import llama, one_thread, tokenizer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nnterp import StandardizedTransformer

WHAT = "memory"
LAYERS = 12

#: A block's values that a hook can reach, by where: the module of the block, whether its input, the element of a tuple.
HOOKED = {
    "layer_input": ("", True, None),
    "attention_norm_output": ("input_layernorm", False, None),
    "self_attn.attention_probabilities": ("self_attn", False, 1),
    "self_attn.attention_premix": ("self_attn.o_proj", True, None),
    "self_attn.attention_output": ("self_attn", False, 0),
    "layer_mid": ("post_attention_layernorm", True, None),
    "mlp_norm_output": ("post_attention_layernorm", False, None),
    "mlp_input": ("mlp", True, None),
    "mlp.mlp_activation": ("mlp.act_fn", False, None),
    "mlp.mlp_neurons": ("mlp.down_proj", True, None),
    "mlp.mlp_output": ("mlp", False, None),
    "layer_output": ("", False, None),
}


def rows() -> list[Row]:
    torch.manual_seed(0)
    with one_thread():
        model = StandardizedTransformer(llama(LAYERS), tokenizer=tokenizer())
        bare = llama(LAYERS)
        ids = torch.randint(0, 256, (4, 256))
        copies = copied(model, ids)
        read, hooked = peak(lambda: read_blocks(model, ids)), peak(lambda: hook_blocks(bare, ids))
    return [
        Row("values of a block that are copies", "values hooked", copies, len(HOOKED), 0.0, unit="tensors"),
        Row(f"peak of {LAYERS} layer_output", "torch hooks", read, hooked, 1.01, unit="MiB"),
    ]


def copied(model: StandardizedTransformer, ids: Tensor) -> int:
    """How many of `HOOKED` of one block are not the very memory that a hook sees."""
    block = model.layers[LAYERS // 2]
    seen: dict[str, int] = {}
    hooks = [
        hook(block._module.get_submodule(module), name, is_input, element, seen)
        for name, (module, is_input, element) in HOOKED.items()
    ]
    with model.trace(ids):
        read = {}.save()
        for name in HOOKED:
            host, _, value = name.rpartition(".")
            read[name] = getattr(block.get(host) if host else block, value)
    for handle in hooks:
        handle.remove()
    return sum(read[name].data_ptr() != seen[name] for name in HOOKED)


def hook(module: nn.Module, name: str, is_input: bool, element: int | None, seen: dict[str, int]) -> Any:
    """Note where the tensor that passes ``module`` lies, under ``name``."""

    def note(value: Any) -> None:
        seen[name] = (value if element is None else value[element]).data_ptr()

    if is_input:
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: note((*args, *kwargs.values())[0]), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, args, output: note(output))


def peak(run: Callable[[], Any]) -> float:
    """The most MiB that torch had allocated at once in ``run``, from when it began."""
    run()  # what only the first run allocates
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    allocations = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most / 2**20


def read_blocks(model: StandardizedTransformer, ids: Tensor) -> list[Tensor]:
    with model.trace(ids):
        read = nnsight.save([model.layers[i].layer_output for i in range(LAYERS)])
    return read


def hook_blocks(model: nn.Module, ids: Tensor) -> list[Tensor]:
    read: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda *call: read.append(call[-1])) for block in model.model.layers]
    model(ids)
    for handle in hooks:
        handle.remove()
    return read
