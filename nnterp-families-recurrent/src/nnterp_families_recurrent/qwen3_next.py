"""Qwen3-Next: gated DeltaNet blocks among attention with gated queries, mixtures with a gated shared expert."""

from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from nnterp import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "gate": "router",
    "shared_expert": "shared_experts",
}


class Layer(components.Layer):
    """Qwen3-Next's block."""


class Attention(components.Attention):
    """Qwen3-Next's attention: a gate from the query projection scales its head outputs, which makes the premix."""


class LinearAttention(components.LinearAttention):
    """Qwen3-Next's gated DeltaNet."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.GatedSharedMoe):
    """Qwen3-Next's mixture, whose gate is a sigmoid."""


ENVOYS = {
    modeling.Qwen3NextDecoderLayer: Layer,
    modeling.Qwen3NextAttention: Attention,
    modeling.Qwen3NextGatedDeltaNet: LinearAttention,
    modeling.Qwen3NextMLP: Mlp,
    modeling.Qwen3NextSparseMoeBlock: Moe,
    modeling.Qwen3NextTopKRouter: components.Router,
}
