"""nnterp: one module vocabulary and one set of named values for every decoder-only transformer, on top of nnsight.

``StandardizedTransformer`` loads a checkpoint of any family; ``model.layers[3].self_attn.attention_probabilities`` then
means the same on each of them. `nnterp.components` says what every value is, `nnterp.families` which plugin serves
which ``model_type``, `nnterp.plugins` how to publish a family.
"""

from importlib.util import find_spec
from typing import Any

from nnterp.components import (
    Attention,
    DerivedEProperty,
    EProperty,
    GatedRecurrence,
    Layer,
    LinearAttention,
    Mlp,
    Moe,
    RecurrentMixer,
    SelectiveScan,
    Standard,
    StateSpace,
    Unavailable,
    Vision,
    axis_size,
    chunk_per_token,
    route_delta_rule,
    route_kernels,
    unavailable,
)
from nnterp.families import UnsupportedFamily
from nnterp.families import default as _default  # noqa: F401  the one family that is the core's own, always there
from nnterp.standardized import Standardized, StandardizedTransformer

__all__ = [
    "Attention",
    "DerivedEProperty",
    "EProperty",
    "GatedRecurrence",
    "Layer",
    "LinearAttention",
    "Mlp",
    "Moe",
    "RecurrentMixer",
    "SelectiveScan",
    "Standard",
    "Standardized",
    "StandardizedTransformer",
    "StateSpace",
    "Unavailable",
    "UnsupportedFamily",
    "Vision",
    "axis_size",
    "chunk_per_token",
    "route_delta_rule",
    "route_kernels",
    "unavailable",
]

# `from nnterp import *` asks for all of these: only where it can be had, with an engine to run on.
if find_spec("nnterp_vllm") and find_spec("vllm"):
    __all__ += ["StandardizedVLLM"]


def __dir__() -> list[str]:
    return sorted({*globals(), "StandardizedVLLM"})


def __getattr__(name: str) -> Any:
    if name != "StandardizedVLLM":
        raise AttributeError(f"module 'nnterp' has no attribute {name!r}")
    if find_spec("nnterp_vllm") is None:
        raise ImportError(
            "StandardizedVLLM comes with another package: pip install 'nnterp[vllm]', or without a GPU "
            "pip install 'nnterp-vllm[cpu]'"
        )
    from nnterp_vllm import StandardizedVLLM

    return StandardizedVLLM
