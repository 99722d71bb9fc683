"""Gemma 2: a norm before and after each sublayer, soft-capped scores and logits."""

from transformers.models.gemma2 import modeling_gemma2 as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Gemma 2's block: ``post_attention_layernorm`` norms what the attention adds, not what the MLP receives."""

    TAPS = components.mid_at("pre_feedforward_layernorm")
    mlp_norm_output = components.Layer.mlp_norm_output.at("pre_feedforward_layernorm.output")


class Attention(components.Attention):
    """Gemma 2's attention: the scores are capped before they are masked; the block adds its normed output."""

    CONTRIBUTION = "../post_attention_layernorm.output"


class Mlp(components.Mlp):
    """Gemma 2's gated feed-forward; the block adds its normed output."""

    CONTRIBUTION = "../post_feedforward_layernorm.output"


ENVOYS = {modeling.Gemma2DecoderLayer: Layer, modeling.Gemma2Attention: Attention, modeling.Gemma2MLP: Mlp}
