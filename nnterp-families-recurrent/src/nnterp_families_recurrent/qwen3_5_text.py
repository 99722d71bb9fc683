"""Qwen3.5: gated DeltaNet blocks among attention with gated queries, a dense feed-forward in each."""

from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Qwen3.5's block."""


class Attention(components.Attention):
    """Qwen3.5's attention: a gate from the query projection scales its head outputs, which makes the premix."""


class LinearAttention(components.LinearAttention):
    """Qwen3.5's gated DeltaNet."""


class Mlp(components.Mlp):
    """Qwen3.5's gated feed-forward."""


ENVOYS = {
    modeling.Qwen3_5DecoderLayer: Layer,
    modeling.Qwen3_5Attention: Attention,
    modeling.Qwen3_5GatedDeltaNet: LinearAttention,
    modeling.Qwen3_5MLP: Mlp,
}
