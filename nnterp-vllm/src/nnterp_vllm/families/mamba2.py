"""Mamba-2 on vLLM: fused blocks of one norm and one state-space mixer."""

from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models import mamba2 as modeling

from nnterp_vllm import components

RENAME = {
    "norm": "input_layernorm",
    "backbone.embeddings": "embed_tokens",
    "backbone.layers": "layers",
    "backbone.norm_f": "norm",
    "mixer": "linear_attn",
}


class Layer(components.FusedMixerLayer):
    """Mamba-2's block."""


class StateSpace(components.StateSpace):
    """Mamba-2's mixer."""


ENVOYS = {modeling.Mamba2DecoderLayer: Layer, MambaMixer2: StateSpace}
