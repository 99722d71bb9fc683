"""Qwen2-MoE: mixtures with a gated shared expert, among dense blocks where the config says."""

from transformers.models.qwen2_moe import modeling_qwen2_moe as modeling

from nnterp import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "gate": "router",
    "shared_expert": "shared_experts",
}


class Layer(components.Layer):
    """Qwen2-MoE's block."""


class Attention(components.Attention):
    """Qwen2-MoE's attention."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.GatedSharedMoe):
    """Qwen2-MoE's mixture, whose gate is a sigmoid."""


ENVOYS = {
    modeling.Qwen2MoeDecoderLayer: Layer,
    modeling.Qwen2MoeAttention: Attention,
    modeling.Qwen2MoeMLP: Mlp,
    modeling.Qwen2MoeSparseMoeBlock: Moe,
    modeling.Qwen2MoeTopKRouter: components.Router,
}
