"""OLMo Hybrid: two classes of blocks, gated DeltaNet behind pre-norms and attention in front of post-norms."""

from transformers.models.olmo_hybrid import modeling_olmo_hybrid as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """The block with attention, OLMo 2's: the attention is called with `layer_input`, the MLP with `layer_mid`.

    `mlp_input` is a copy, so that an edit of it in place reaches the MLP alone.
    """

    TAPS = {**components.mid_at("mlp"), "mlp_input": components.apart(components.argument("mlp"))}
    attention_norm_output = components.unavailable(components.POST_NORM)
    mlp_input = components.Layer.mlp_input.at("mlp_input")
    mlp_norm_output = components.unavailable(components.POST_NORM)


class LinearLayer(components.Layer):
    """The block with a gated DeltaNet, the plain pre-norm block."""


class Attention(components.Attention):
    """OLMo Hybrid's attention; the block adds its normed output."""

    CONTRIBUTION = "../post_attention_layernorm.output"


class LinearAttention(components.LinearAttention):
    """OLMo Hybrid's gated DeltaNet; with ``linear_allow_neg_eigval`` its betas go up to 2."""


def added(mlp: components.Mlp) -> str:
    """Where what the block adds for its MLP is read: behind the post-norm of the block that has one."""
    return "../post_feedforward_layernorm.output" if isinstance(mlp.parent, Layer) else "output"


class Mlp(components.Mlp):
    """OLMo Hybrid's gated feed-forward."""

    mlp_output = components.Mlp.mlp_output.at(added)


ENVOYS = {
    modeling.OlmoHybridAttentionDecoderLayer: Layer,
    modeling.OlmoHybridLinearAttentionDecoderLayer: LinearLayer,
    modeling.OlmoHybridAttention: Attention,
    modeling.OlmoHybridGatedDeltaNet: LinearAttention,
    modeling.OlmoHybridMLP: Mlp,
}
