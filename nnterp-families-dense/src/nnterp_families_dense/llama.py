"""Llama: the plain pre-norm block; its names are the standard ones."""

from transformers.models.llama import modeling_llama as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Llama's block."""


class Attention(components.Attention):
    """Llama's attention."""


class Mlp(components.Mlp):
    """Llama's gated feed-forward."""


ENVOYS = {modeling.LlamaDecoderLayer: Layer, modeling.LlamaAttention: Attention, modeling.LlamaMLP: Mlp}
