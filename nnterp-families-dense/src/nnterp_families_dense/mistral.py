"""Mistral: Llama's block, with every attention in a sliding window where the config has one."""

from transformers.models.mistral import modeling_mistral as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Mistral's block."""


class Attention(components.Attention):
    """Mistral's attention."""


class Mlp(components.Mlp):
    """Mistral's gated feed-forward."""


ENVOYS = {modeling.MistralDecoderLayer: Layer, modeling.MistralAttention: Attention, modeling.MistralMLP: Mlp}
