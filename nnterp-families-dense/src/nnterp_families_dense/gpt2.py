"""GPT-2: pre-norm blocks; queries, keys and values are split views of one projection."""

from transformers.models.gpt2 import modeling_gpt2 as modeling

from nnterp import components

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
    """GPT-2's attention, which leaves the shared interface when scores are computed in float32."""

    def off_interface(self) -> str | None:
        if self._module.reorder_and_upcast_attn and components.implementation_of(self) == "eager":
            return "reorder_and_upcast_attn computes the scores in float32, in a method of its own"
        return components.Attention.off_interface(self)  # by name: a remote run ships this class without super()'s cell


class Mlp(components.Mlp):
    """GPT-2's feed-forward."""


ENVOYS = {modeling.GPT2Block: Layer, modeling.GPT2Attention: Attention, modeling.GPT2MLP: Mlp}


def intermediate_size(model) -> int:
    """``n_inner``, which released configs leave unset for four times the hidden size."""
    return model.config.n_inner or 4 * model.hidden_size
