"""Falcon: blocks parallel or not, one key head or several, rotary positions or ALiBi, as the config says."""

from transformers.models.falcon import modeling_falcon as modeling

from nnterp import components

RENAME = {
    "transformer.word_embeddings": "embed_tokens",
    "transformer.h": "layers",
    "transformer.ln_f": "norm",
    "ln_attn": "input_layernorm",
    "self_attention": "self_attn",
    "ln_mlp": "post_attention_layernorm",
    "dense": "o_proj",
    "dense_4h_to_h": "down_proj",
    "act": "act_fn",
}


def parallel(layer: components.Layer) -> str | None:
    """Why there is no stream between the sublayers of ``layer``, or None: they run in sequence."""
    config = layer._module.config
    return components.PARALLEL if config.new_decoder_architecture or config.parallel_attn else None


def mlp_norm(layer: components.Layer) -> str:
    """The norm of the MLP's input: its own, or the one that a parallel block shares with the attention."""
    own = parallel(layer) is None or hasattr(layer._module, "ln_mlp")
    return f"{'post_attention_layernorm' if own else 'input_layernorm'}.output"


class Layer(components.Layer):
    """Falcon's block: parallel on one norm (7B, 11B) or on two (40B), or sequential (RW).

    Where the norm is one, `attention_norm_output` and `mlp_norm_output` are one tensor, and an edit of either reaches
    both sublayers. A parallel block adds the attention's output to the MLP's in place; while traced it does not. In
    training, ``hidden_dropout`` drops out of the contributions as it adds them, out of a parallel block's together.
    """

    returns_tuple = True
    TAPS = {"layer_mid": components.result("dropout_add"), "mlp_output": components.out_of_place("mlp_output")}
    layer_mid = components.Layer.layer_mid.at("layer_mid", unavailable=parallel)
    mlp_norm_output = components.Layer.mlp_norm_output.at(mlp_norm)


class FlashAttention(components.Attention):
    """Falcon's attention under FlashAttention, which computes no scores.

    In the new decoder architecture (40B) keys and values are repeated for the query heads before the cache, so they are
    served with ``num_heads`` heads and not with ``num_kv_heads``.
    """

    TAPS = {"attention_inputs": components.assigned(("query_layer", "key_layer", "value_layer"), after="update")}
    attention_head_outputs = components.Attention.attention_premix.at("o_proj.input")


class Attention(FlashAttention):
    """Falcon's attention, eager or through torch's SDPA.

    Under ALiBi the scores include its bias, and are float32 in half precision. transformers adds that bias twice in the
    eager forward, once under SDPA: the two give different logits.
    """

    TAPS = {
        **FlashAttention.TAPS,
        "attention_scores": components.each(components.argument("softmax"), components.argument("softmax", 0, 1)),
        "attention_probabilities": components.each(
            components.result("softmax"), components.result("attention_dropout")
        ),
    }


class Mlp(components.Mlp):
    """Falcon's feed-forward."""


ENVOYS = {
    modeling.FalconDecoderLayer: Layer,
    modeling.FalconFlashAttention2: FlashAttention,
    modeling.FalconAttention: Attention,
    modeling.FalconMLP: Mlp,
}


def num_kv_heads(model) -> int:
    """Heads of keys and values as projected: one under multi-query attention."""
    return model.layers[0].self_attn.num_kv_heads


def intermediate_size(model) -> int:
    """``ffn_hidden_size``."""
    return model.config.ffn_hidden_size
