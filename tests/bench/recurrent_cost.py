"""What reading a recurrent mixer costs: the values at its kernel call, and every token's state in time and memory.

A kernel call's values are the kernel's own arguments. The states are not: a mechanism that holds one per token holds
``tokens`` of them whatever reads it, and Mamba-2's, whose scan in chunks of one token weighs every pair of tokens,
takes time and memory that grow with the square.
"""

from collections.abc import Callable
from typing import Any

import nnsight
import torch
from measure import Row, Samples, in_ms
from memory_cost import peak
from nnsight.modeling.transformers import TransformersModel
from subjects import one_thread, tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from nnterp import StandardizedTransformer, chunk_per_token, route_kernels

WHAT = "recurrent mixers"

LAYERS = 12
TOKENS = 16
PROMPTS = (128, 256, 512)
ROUNDS = 3
TURNS = 15

SHARED = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": LAYERS}
MAMBA2 = {**SHARED, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 64}
DELTANET = {
    **SHARED,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "num_hidden_layers": LAYERS + 1,
    "layer_types": ["linear_attention"] * LAYERS + ["full_attention"],  # its cache cannot do without one
}

#: By model type: its config, nnsight's name of the kernel's call, and where its mixers and the arguments read are.
READS: dict[str, tuple[dict[str, Any], str, Callable[[Any], Any], tuple[int | str, ...]]] = {
    "mamba2": (MAMBA2, "mamba2_chunk_scan_0", lambda model: model.backbone.layers, (4, 3, 0)),
    "qwen3_5_text": (DELTANET, "torch_chunk_gated_delta_rule_0", lambda model: model.model.layers, (0, 1, 2)),
}
VALUES = ("attention_queries", "attention_keys", "attention_values", "attention_head_outputs")


def rows() -> list[Row]:
    with one_thread():
        return [row for kind in READS for row in (*reading(kind), *states(kind))]


def build(kind: str, weights: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **READS[kind][0])).eval()
    if weights is not None:
        model.load_state_dict(weights, assign=True)
    return model


def reading(kind: str) -> list[Row]:
    """Queries, keys, values and head outputs of every block: one location before the kernel and one behind it."""
    ids = torch.randint(0, 256, (1, TOKENS))
    samples = Samples()
    weights = build(kind).state_dict()
    for _ in range(ROUNDS):
        subjects = {
            "nnterp": with_nnterp(build(kind, weights), ids),
            "nnsight": with_nnsight(kind, build(kind, weights), ids),
        }
        for run in subjects.values():
            run(None)
        samples.interleave(subjects, TURNS)
    what = f"{len(VALUES)} values at {LAYERS} kernel calls, {kind}"
    return [in_ms(what, "nnsight, .source", samples, "nnterp", "nnsight", 1.10)]


def mixers(model: StandardizedTransformer) -> list[Any]:
    return [model.layers[index].linear_attn for index in range(LAYERS)]


def with_nnterp(module: nn.Module, ids: Tensor) -> Callable[[Any], Any]:
    model = StandardizedTransformer(module, tokenizer=tokenizer())

    def run(_: Any) -> Any:
        with model.trace(ids):
            read = nnsight.save([getattr(mixer, value) for mixer in mixers(model) for value in VALUES])
        return read

    return run


def with_nnsight(kind: str, module: nn.Module, ids: Tensor) -> Callable[[Any], Any]:
    _, kernel, blocks, arguments = READS[kind]
    model = TransformersModel(module, task="text-generation", tokenizer=tokenizer())
    found = [getattr(block, "mixer" if kind == "mamba2" else "linear_attn") for block in blocks(model)[:LAYERS]]
    for mixer in found:
        _ = mixer.source  # instrumented before the first trace

    def run(_: Any) -> Any:
        with model.trace(ids):
            values = []
            for mixer in found:
                call = getattr(mixer.source, kernel)
                args, _ = call.inputs
                values += [args[position] for position in arguments]
                values.append(call.output[0])
            read = nnsight.save(values)
        return read

    return run


def states(kind: str) -> list[Row]:
    """Every token's state in every block, from prompt to prompt twice as long: time and memory, and their growth."""
    model = StandardizedTransformer(build(kind), tokenizer=tokenizer())
    if kind == "mamba2":
        chunk_per_token(model)
    else:
        route_kernels(model.family, "torch")
    try:
        return growing(kind, model)
    finally:
        route_kernels(model.family, "default")


def growing(kind: str, model: StandardizedTransformer) -> list[Row]:
    # The pairs of tokens weigh most of a scan in chunks of one; a loop over tokens is one step each.
    power = 2 if kind == "mamba2" else 1
    found, before = [], None
    for tokens in PROMPTS:
        ids = torch.randint(0, 256, (1, tokens))

        def run(_: Any = None, ids: Tensor = ids) -> Any:
            with model.trace(ids):
                read = nnsight.save([mixer.states for mixer in mixers(model)])
            return read

        held = sum(value.nbytes for value in run()) / 2**20
        samples = Samples()
        samples.interleave({"states": run}, 3)
        seconds, most = samples.typical("states"), peak(run)
        if before is not None:
            growth = 2.0**power
            what = f"states of {tokens} tokens, {kind}"
            bound = growth * 1.1
            found.append(Row(what, f"of {tokens // 2}", seconds * 1e3, before[0] * 1e3, bound))
            found.append(Row(f"{what}: peak", f"of {tokens // 2}", most, before[1], bound, unit="MiB"))
        found.append(Row(f"states of {tokens} tokens, {kind}: peak", "the states", most, held, unit="MiB"))
        before = seconds, most
    return found
