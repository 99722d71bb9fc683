"""GPT-NeoX (Pythia): attention and MLP in parallel, each with a norm of its own, or in sequence, as the config says."""

from transformers.models.gpt_neox import modeling_gpt_neox as modeling

from nnterp import components

RENAME = {
    "gpt_neox.embed_in": "embed_tokens",
    "gpt_neox.layers": "layers",
    "gpt_neox.final_layer_norm": "norm",
    "attention": "self_attn",
    "dense": "o_proj",
    "dense_4h_to_h": "down_proj",
    "act": "act_fn",
}


def no_mid(layer: components.Layer) -> str | None:
    """Why there is no stream between the sublayers of ``layer``, or None."""
    return components.PARALLEL if layer._module.use_parallel_residual else None


class Layer(components.Layer):
    """GPT-NeoX's block: both norms read the block's input where it is parallel."""

    layer_mid = components.Layer.layer_mid.at("layer_mid", unavailable=no_mid)


class Attention(components.Attention):
    """GPT-NeoX's attention; the block drops out what it adds.

    The values are a view of one projection: without a cache torch refuses in-place edits of them under autograd.
    """

    CONTRIBUTION = "../post_attention_dropout.output"


class Mlp(components.Mlp):
    """GPT-NeoX's feed-forward; the block drops out what it adds."""

    CONTRIBUTION = "../post_mlp_dropout.output"


ENVOYS = {modeling.GPTNeoXLayer: Layer, modeling.GPTNeoXAttention: Attention, modeling.GPTNeoXMLP: Mlp}
