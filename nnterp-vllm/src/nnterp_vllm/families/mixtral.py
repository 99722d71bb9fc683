"""Mixtral on vLLM: fused blocks with a mixture in each."""

from vllm.model_executor.models import mixtral as modeling

from nnterp_vllm import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "block_sparse_moe": "mlp",
    "gate": "router",
}


class Layer(components.FusedLayer):
    """Mixtral's block."""


class Attention(components.Attention):
    """Mixtral's attention."""


class Moe(components.Moe):
    """Mixtral's mixture."""


ENVOYS = {modeling.MixtralDecoderLayer: Layer, modeling.MixtralAttention: Attention, modeling.MixtralMoE: Moe}
