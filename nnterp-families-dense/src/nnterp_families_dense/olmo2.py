"""OLMo 2: no norm before a sublayer, one after it; queries and keys are normed before they are split into heads."""

from transformers.models.olmo2 import modeling_olmo2 as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """OLMo 2's block: the attention is called with `layer_input`, the MLP with `layer_mid`.

    `mlp_input` is a copy, so that an edit of it in place reaches the MLP alone.
    """

    TAPS = {**components.mid_at("mlp"), "mlp_input": components.apart(components.argument("mlp"))}
    attention_norm_output = components.unavailable(components.POST_NORM)
    mlp_input = components.Layer.mlp_input.at("mlp_input")
    mlp_norm_output = components.unavailable(components.POST_NORM)


class Attention(components.Attention):
    """OLMo 2's attention; the block adds its normed output."""

    CONTRIBUTION = "../post_attention_layernorm.output"


class Mlp(components.Mlp):
    """OLMo 2's gated feed-forward; the block adds its normed output."""

    CONTRIBUTION = "../post_feedforward_layernorm.output"


ENVOYS = {modeling.Olmo2DecoderLayer: Layer, modeling.Olmo2Attention: Attention, modeling.Olmo2MLP: Mlp}
