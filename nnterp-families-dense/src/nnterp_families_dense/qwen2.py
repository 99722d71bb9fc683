"""Qwen 2: Llama's block with biases in the query, key and value projections, and windows on the blocks that say so."""

from transformers.models.qwen2 import modeling_qwen2 as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Qwen 2's block."""


class Attention(components.Attention):
    """Qwen 2's attention."""


class Mlp(components.Mlp):
    """Qwen 2's gated feed-forward."""


ENVOYS = {modeling.Qwen2DecoderLayer: Layer, modeling.Qwen2Attention: Attention, modeling.Qwen2MLP: Mlp}
