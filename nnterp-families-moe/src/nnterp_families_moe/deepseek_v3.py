"""DeepSeek-V3: latent attention, sigmoid scores with a correction bias, a shared expert, dense first blocks."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm", "gate": "router"}


class Layer(components.Layer):
    """DeepSeek-V3's block."""


class Attention(components.Attention):
    """DeepSeek-V3's latent attention: keys and values are expanded to every head before they are mixed."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.BiasedMoe):
    """DeepSeek-V3's mixture: the bias and the groups choose the experts, the scores alone weight them."""


ENVOYS = {
    modeling.DeepseekV3DecoderLayer: Layer,
    modeling.DeepseekV3Attention: Attention,
    modeling.DeepseekV3MLP: Mlp,
    modeling.DeepseekV3MoE: Moe,
    modeling.DeepseekV3TopkRouter: components.BiasedRouter,
}


def head_dim(model) -> int:
    """Width of a head's values: the config's ``head_dim`` is the rotary part of its queries."""
    return model.config.get_text_config().v_head_dim


def qk_head_dim(model) -> int:
    """Width of a head's queries and keys, with and without position."""
    config = model.config.get_text_config()
    return config.qk_nope_head_dim + config.qk_rope_head_dim
