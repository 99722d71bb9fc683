"""Qwen2.5-VL's text model: Qwen 2's block, reached through its wrapper alone.

Its positions are three numbers a token, of time, height and width (M-RoPE). The model folds them into the rotary
tables, so `attention_queries` and `attention_keys` are rotated by all three already.
"""

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Qwen2.5-VL's text block."""


class Attention(components.Attention):
    """Qwen2.5-VL's attention on the stream."""


class Mlp(components.Mlp):
    """Qwen2.5-VL's gated feed-forward."""


ENVOYS = {modeling.Qwen2_5_VLDecoderLayer: Layer, modeling.Qwen2_5_VLAttention: Attention, modeling.Qwen2MLP: Mlp}
