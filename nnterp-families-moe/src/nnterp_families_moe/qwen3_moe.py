"""Qwen3-MoE: mixtures among dense blocks where the config says; queries and keys normed per head."""

from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm", "gate": "router"}


class Layer(components.Layer):
    """Qwen3-MoE's block."""


class Attention(components.Attention):
    """Qwen3-MoE's attention."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.Moe):
    """Qwen3-MoE's mixture."""


ENVOYS = {
    modeling.Qwen3MoeDecoderLayer: Layer,
    modeling.Qwen3MoeAttention: Attention,
    modeling.Qwen3MoeMLP: Mlp,
    modeling.Qwen3MoeSparseMoeBlock: Moe,
    modeling.Qwen3MoeTopKRouter: components.Router,
}
