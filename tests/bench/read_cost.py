"""What reading values costs, and what a model that nobody reads inside costs, where overhead dominates."""

from collections.abc import Callable
from typing import Any

import nnsight
import torch
from measure import Row, Samples, in_ms
from nnsight.modeling.transformers import TransformersModel
from subjects import llama, one_thread, tokenizer
from torch import Tensor, nn

from nnterp import StandardizedTransformer

#: One turn: what it returns is kept until the turn has been counted.
Run = Callable[[Any], Any]

WHAT = "reads"

LAYERS = 12
TOKENS = 16
#: Models are built anew each round: where in memory one lies is worth two percent.
ROUNDS = 9
TURNS = 40


def rows() -> list[Row]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, TOKENS))
    samples = Samples()
    with one_thread():
        weights = llama(LAYERS).state_dict()
        for _ in range(ROUNDS):
            subjects = {
                **with_hooks(llama(LAYERS, weights=weights), ids),
                **with_nnsight(llama(LAYERS, weights=weights), ids),
                **with_operations(llama(LAYERS, weights=weights), ids),
                **with_nnterp(llama(LAYERS, weights=weights), ids),
            }
            for run in subjects.values():
                run(None)  # the first run compiles and installs
            samples.interleave(subjects, TURNS)
    blocks, patterns = f"layer_output of {LAYERS} blocks", f"attention_probabilities of {LAYERS}"
    return [
        in_ms(blocks, "nnsight", samples, "nnterp blocks", "nnsight blocks", 1.05),
        in_ms(patterns, "nnsight, .source", samples, "nnterp patterns", "nnsight patterns", 0.85),
        in_ms(patterns, "nnterp, layer_output", samples, "nnterp patterns", "nnterp blocks", 1.08),
        in_ms("logits, nothing inside", "nnsight", samples, "nnterp logits", "nnsight logits", 1.04),
        in_ms("a forward outside a trace", "nnsight", samples, "nnterp untraced", "nnsight untraced", 1.03),
        in_ms(blocks, "torch hooks", samples, "nnterp blocks", "hooked blocks"),
        in_ms(blocks, "a bare forward", samples, "nnterp blocks", "bare forward"),
        in_ms(patterns, "a bare forward", samples, "nnterp patterns", "bare forward"),
    ]


def with_nnterp(module: nn.Module, ids: Tensor) -> dict[str, Run]:
    model = StandardizedTransformer(module, tokenizer=tokenizer())

    def blocks(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save([model.layers[i].layer_output for i in range(LAYERS)])
        return read

    def patterns(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save([model.layers[i].self_attn.attention_probabilities for i in range(LAYERS)])
        return read

    def logits(_: Any) -> Any:
        with model.trace(ids):
            read = model.logits.save()
        return read

    return {
        "nnterp blocks": blocks,
        "nnterp patterns": patterns,
        "nnterp logits": logits,
        "nnterp untraced": lambda _: model._module(ids),
    }


def with_nnsight(module: nn.Module, ids: Tensor) -> dict[str, Run]:
    model = TransformersModel(module, task="text-generation", tokenizer=tokenizer())

    def blocks(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save([model.model.layers[i].output for i in range(LAYERS)])
        return read

    def logits(_: Any) -> Any:
        with model.trace(ids):
            read = model.output.logits.save()
        return read

    return {
        "nnsight blocks": blocks,
        "nnsight logits": logits,
        "nnsight untraced": lambda _: model._module(ids),
    }


def with_operations(module: nn.Module, ids: Tensor) -> dict[str, Run]:
    """nnsight's way into a forward, on a model of its own: it leaves the model slower for good."""
    model = TransformersModel(module, task="text-generation", tokenizer=tokenizer())
    attentions = [block.self_attn for block in model.model.layers]
    # The last operation of that name is the attention call; its label counts on from release to release.
    call = [name for name in attentions[0].source.names if name.startswith("attention_interface")][-1]

    def patterns(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save(
                [getattr(attn.source, call).source.nn_functional_dropout_0.output for attn in attentions]
            )
        return read

    return {"nnsight patterns": patterns}


def with_hooks(model: nn.Module, ids: Tensor) -> dict[str, Run]:
    def blocks(_: Any) -> Any:
        read: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda *call: read.append(call[-1])) for block in model.model.layers]
        model(ids)
        for hook in hooks:
            hook.remove()
        return read

    return {"hooked blocks": blocks, "bare forward": lambda _: model(ids)}
