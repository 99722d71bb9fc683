"""Qwen3 on vLLM: fused blocks; queries and keys normed per head."""

from vllm.model_executor.models import qwen3 as modeling

from nnterp_vllm import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.FusedLayer):
    """Qwen3's block."""


class Attention(components.Attention):
    """Qwen3's attention."""


class Mlp(components.Mlp):
    """Qwen3's gated feed-forward."""


ENVOYS = {modeling.Qwen3DecoderLayer: Layer, modeling.Qwen3Attention: Attention, modeling.Qwen3MLP: Mlp}
