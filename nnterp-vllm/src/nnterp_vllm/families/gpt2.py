"""GPT-2 on vLLM: plain blocks, which take and return the stream whole."""

from vllm.model_executor.models import gpt2 as modeling

from nnterp_vllm import components

RENAME = {
    "transformer.wte": "embed_tokens",
    "transformer.h": "layers",
    "transformer.ln_f": "norm",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "attn.o_proj",
    "mlp.c_proj": "mlp.down_proj",
    "mlp.act": "mlp.act_fn",
}


class Layer(components.Layer):
    """GPT-2's block."""


class Attention(components.Attention):
    """GPT-2's attention."""


class Mlp(components.Mlp):
    """GPT-2's feed-forward."""


ENVOYS = {modeling.GPT2Block: Layer, modeling.GPT2Attention: Attention, modeling.GPT2MLP: Mlp}


def intermediate_size(model) -> int:
    """``n_inner``, which released configs leave unset for four times the hidden size."""
    return model.config.n_inner or 4 * model.hidden_size
