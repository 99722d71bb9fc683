"""Llama on vLLM: fused blocks."""

from vllm.model_executor.models import llama as modeling

from nnterp_vllm import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.FusedLayer):
    """Llama's block."""


class Attention(components.Attention):
    """Llama's attention."""


class Mlp(components.Mlp):
    """Llama's gated feed-forward."""


ENVOYS = {modeling.LlamaDecoderLayer: Layer, modeling.LlamaAttention: Attention, modeling.LlamaMLP: Mlp}
