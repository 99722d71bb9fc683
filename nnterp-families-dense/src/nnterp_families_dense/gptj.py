"""GPT-J: attention and MLP in parallel on one norm; the head has a bias."""

from transformers.models.gptj import modeling_gptj as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "transformer.wte": "embed_tokens",
    "transformer.h": "layers",
    "transformer.ln_f": "norm",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "out_proj": "o_proj",
    "fc_out": "down_proj",
    "act": "act_fn",
}

#: Releases of transformers in which the attention has its arithmetic in a method and the block returns a tuple.
OWN_ARITHMETIC = hasattr(modeling.GPTJAttention, "_attn")


class Layer(components.ParallelLayer):
    """GPT-J's block."""

    returns_tuple = OWN_ARITHMETIC


class Attention(components.Attention):
    """GPT-J's attention: its scores are float32, and positions rotate the first ``rotary_dim`` of each head."""

    METHOD = "_attn" if OWN_ARITHMETIC else None


class Mlp(components.Mlp):
    """GPT-J's feed-forward."""


ENVOYS = {modeling.GPTJBlock: Layer, modeling.GPTJAttention: Attention, modeling.GPTJMLP: Mlp}


def intermediate_size(model) -> int:
    """``n_inner``, which released configs leave unset for four times the hidden size."""
    return text_config(model).n_inner or 4 * model.hidden_size
