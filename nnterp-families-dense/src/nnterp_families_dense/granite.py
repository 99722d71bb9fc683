"""Granite: Llama's block with scaled embeddings, contributions and logits."""

from torch import Tensor
from transformers.models.granite import modeling_granite as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Granite's block, which multiplies what it adds by ``residual_multiplier``."""

    TAPS = {
        **components.Layer.TAPS,
        "attention_term": components.product("residual_multiplier", 0),
        "mlp_term": components.product("residual_multiplier", 1),
    }


class Attention(components.Attention):
    """Granite's attention: ``attention_multiplier`` scales its scores."""

    CONTRIBUTION = "../attention_term"


class Mlp(components.Mlp):
    """Granite's gated feed-forward."""

    CONTRIBUTION = "../mlp_term"


ENVOYS = {modeling.GraniteDecoderLayer: Layer, modeling.GraniteAttention: Attention, modeling.GraniteMLP: Mlp}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The logits are the head's output divided by ``logits_scaling``."""
    return model.lm_head(model.norm(hidden)) / text_config(model).logits_scaling
