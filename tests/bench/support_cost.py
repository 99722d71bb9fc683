"""What asking a large model what it has costs, from its config alone."""

import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from measure import Row
from subjects import tokenizer
from transformers import LlamaConfig

from nnterp import StandardizedTransformer

WHAT = "support() of a 405B Llama"

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SIZES = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qk_head_dim",
    "intermediate_size",
)
BLOCK_SIZES = ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim")


def rows() -> list[Row]:
    with TemporaryDirectory() as checkpoint:  # a config and no weights
        LlamaConfig(**LLAMA_405B).save_pretrained(checkpoint)
        kwargs = {"tokenizer": tokenizer(), "attn_implementation": "eager"}
        StandardizedTransformer(checkpoint, **kwargs)  # what only the first build imports
        model, build = timed(lambda: StandardizedTransformer(checkpoint, **kwargs))
        support, asking = timed(model.support)
        sizes, sizing = timed(lambda: all_sizes(model))
        if model.dispatched or any(parameter.device.type != "meta" for parameter in model._module.parameters()):
            raise AssertionError("asking what the model has loaded its weights")
        missing = [name for name, reason in support.items() if reason is not None]
        if missing or sizes["num_layers"] != 126:
            raise AssertionError(f"not the model described: {sizes['num_layers']} layers, without {missing}")
    return [
        Row("support() of 126 layers, first time", "building the model", asking * 1e3, build * 1e3, 1.0),
        Row("its sizes, and every block's", "building the model", sizing * 1e3, build * 1e3, 1.0),
    ]


def all_sizes(model: StandardizedTransformer) -> dict[str, Any]:
    sizes = {name: getattr(model, name) for name in SIZES}
    for index, block in enumerate(model.layers):
        sizes[index] = [getattr(block.self_attn, name) for name in BLOCK_SIZES] + [block.mlp.intermediate_size]
    return sizes


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = run()
    return result, time.process_time() - started
