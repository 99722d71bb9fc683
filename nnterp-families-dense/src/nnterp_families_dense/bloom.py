"""BLOOM: attention and MLP add the residual themselves; the attention does its own arithmetic, with ALiBi positions."""

from transformers.models.bloom import modeling_bloom as modeling

from nnterp import components

RENAME = {
    "transformer.word_embeddings": "embed_tokens",
    "transformer.h": "layers",
    "transformer.ln_f": "norm",
    "self_attention": "self_attn",
    "dense": "o_proj",
    "dense_4h_to_h": "down_proj",
    "gelu_impl": "act_fn",
}


class Layer(components.Layer):
    """BLOOM's block. ``word_embeddings_layernorm`` norms the embeddings before the first.

    With ``apply_residual_connection_post_layernorm`` each sublayer's output is added to its norm's output instead of to
    the stream: ``layer_mid`` is ``attention_norm_output + attention_output``, ``layer_output`` is
    ``mlp_norm_output + mlp_output``. In training, ``hidden_dropout`` drops out of the contributions as it adds them.
    """

    returns_tuple = True
    TAPS = {
        **components.Layer.TAPS,
        "mlp_input": components.apart(components.argument("mlp"), when="self.apply_residual_connection_post_layernorm"),
    }
    mlp_input = components.Layer.mlp_input.at("mlp_input")


class Attention(components.Attention):
    """BLOOM's attention. Its scores include ALiBi's bias, which grows with the position of the key."""

    TAPS = {
        "attention_inputs": components.assigned(("query_layer", "key_layer", "value_layer"), after="update"),
        "attention_scores": components.argument("softmax"),
        "attention_probabilities": components.result("attention_dropout"),
        "merged_heads": components.result("_merge_heads"),
        "attention_term": components.argument("dropout_add"),
    }
    CONTRIBUTION = "attention_term"
    attention_head_outputs = components.Attention.attention_premix.at("merged_heads")
    attention_premix = components.Attention.attention_premix.at("merged_heads")


class Mlp(components.Mlp):
    """BLOOM's feed-forward."""

    TAPS = {"mlp_term": components.argument("dropout_add")}
    CONTRIBUTION = "mlp_term"
    mlp_neurons = components.Mlp.mlp_neurons.at("act_fn.output")


ENVOYS = {modeling.BloomBlock: Layer, modeling.BloomAttention: Attention, modeling.BloomMLP: Mlp}


def intermediate_size(model) -> int:
    """Four times the hidden size, which the config does not say."""
    return 4 * model.hidden_size
