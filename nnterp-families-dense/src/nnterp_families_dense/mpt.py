"""MPT: the MLP adds the residual itself; the attention does its own arithmetic, with ALiBi positions."""

from transformers.models.mpt import modeling_mpt as modeling

from nnterp import components

RENAME = {
    "transformer.wte": "embed_tokens",
    "transformer.blocks": "layers",
    "transformer.norm_f": "norm",
    "norm_1": "input_layernorm",
    "attn": "self_attn",
    "norm_2": "post_attention_layernorm",
    "ffn": "mlp",
    "out_proj": "o_proj",
    "act": "act_fn",
}


class Layer(components.Layer):
    """MPT's block."""

    returns_tuple = True


class Attention(components.Attention):
    """MPT's attention. Its scores are float32 and include ALiBi's bias, which counts back from the last key.

    Queries, keys and values are chunks of one projection: torch refuses in-place edits of them under autograd, but of
    keys and values that a cache has joined; assign instead.
    """

    TAPS = {
        "attention_inputs": components.assigned(("query_states", "key_states", "value_states"), after="update"),
        "attention_scores": components.argument("softmax"),
        "attention_probabilities": components.result("dropout"),
    }
    attention_head_outputs = components.Attention.attention_premix.at("o_proj.input")


class Mlp(components.Mlp):
    """MPT's feed-forward."""

    TAPS = {"mlp_term": components.result("dropout")}
    CONTRIBUTION = "mlp_term"


ENVOYS = {modeling.MptBlock: Layer, modeling.MptAttention: Attention, modeling.MptMLP: Mlp}


def intermediate_size(model) -> int:
    """Four times the hidden size whatever ``expansion_ratio`` says, which transformers' MPT does not read."""
    return 4 * model.hidden_size
