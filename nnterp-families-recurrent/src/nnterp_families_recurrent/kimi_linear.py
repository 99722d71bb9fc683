"""Kimi Linear: delta attention with a decay per channel among latent attention without positions, and mixtures."""

from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from nnterp import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "gate": "router",
    modeling.KimiLinearDeltaAttention: "linear_attn",  # both kinds are a block's `self_attn`
}


class Layer(components.Layer):
    """Kimi Linear's block."""


class Attention(components.Attention):
    """Kimi Linear's latent attention: keys and values are expanded to every head before they are mixed."""


class LinearAttention(components.ChannelLinearAttention):
    """Kimi delta attention."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.BiasedMoe):
    """Kimi Linear's mixture: the bias and the groups choose the experts, the scores alone weight them."""


ENVOYS = {
    modeling.KimiLinearDecoderLayer: Layer,
    modeling.KimiLinearAttention: Attention,
    modeling.KimiLinearDeltaAttention: LinearAttention,
    modeling.KimiLinearMLP: Mlp,
    modeling.KimiLinearMoE: Moe,
    modeling.KimiLinearTopkRouter: components.BiasedRouter,
}


def head_dim(model) -> int:
    """Width of a head's values: the config's ``head_dim`` is the part of its queries that elsewhere is rotary."""
    return model.config.get_text_config().v_head_dim


def qk_head_dim(model) -> int:
    """Width of a head's queries and keys."""
    config = model.config.get_text_config()
    return config.qk_nope_head_dim + config.qk_rope_head_dim
