"""nnterp: one module vocabulary and one set of named values for every decoder-only transformer, on top of nnsight.

``StandardizedTransformer`` loads a checkpoint of any family; ``model.layers[3].self_attn.attention_probabilities`` then
means the same on each of them. `nnterp.components` says what every value is, `nnterp.families` which plugin serves
which ``model_type``, `nnterp.plugins` how to publish a family.
"""

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


# Not in `__all__`: `from nnterp import *` asks for all of that, and nnterp-vllm may not be installed.
def __dir__() -> list[str]:
    return sorted({*globals(), "StandardizedVLLM"})


def __getattr__(name: str) -> Any:
    if name != "StandardizedVLLM":
        raise AttributeError(f"module 'nnterp' has no attribute {name!r}")
    try:
        from nnterp_vllm import StandardizedVLLM
    except ImportError as error:
        raise ImportError("StandardizedVLLM comes with another package: pip install 'nnterp[vllm]'") from error
    return StandardizedVLLM
