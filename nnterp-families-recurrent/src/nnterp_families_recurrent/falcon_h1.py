"""Falcon-H1: attention and a Mamba-2 mixer side by side on one norm in every block, with multipliers everywhere.

The contributions are the terms that are added to the stream: each mixer's output times its multiplier. What the
multipliers scale besides (embeddings, keys, the projections inside) is served as it is used.
"""

from typing import Any

from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1 as modeling

from nnterp import components
from nnterp.components import Residual
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.final_layernorm": "norm",
    "mamba": "linear_attn",
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
}


class Layer(components.Layer):
    """Falcon-H1's block: ``layer_input`` and three contributions, two of which are in `layer_mid`.

    `attention_norm_output` is what both mixers are called with, the attention times ``attention_in_multiplier``.
    """

    returns_tuple = True
    TAPS = {
        **components.Layer.TAPS,
        "mixer_term": components.product("ssm_out_multiplier"),
        "attention_term": components.product("attn_out_multiplier"),
    }


class Attention(components.Attention):
    """Falcon-H1's attention; its contribution is its output times ``attention_out_multiplier``."""

    CONTRIBUTION = "../attention_term"


class StateSpace(components.StateSpace):
    """Falcon-H1's Mamba-2 mixer; its contribution is its output times ``ssm_out_multiplier``.

    `attention_head_outputs` are before the gate, whether the norm applies it or, without ``mamba_rms_norm``, a decode
    step's kernel.
    """

    CONTRIBUTION = "../mixer_term"

    @components.EProperty(lambda mixer: mixer.CONTRIBUTION, "What the mixer adds to the residual stream")
    def attention_output(self, value: Tensor) -> Residual:
        """What the mixer adds to the residual stream, ``[batch, seq, hidden_size]``. In-place edits and assignment
        reach the model.

        With ``mamba_rms_norm``, transformers before 5.24.0 loses the axis of tokens in a call of a single one, which
        adds up right in one row and wrong in several.
        """
        return value.unsqueeze(1) if value.dim() == 2 else value


class Mlp(components.Mlp):
    """Falcon-H1's gated feed-forward; ``mlp_multipliers`` scale what its activation receives and what it returns."""


ENVOYS = {
    modeling.FalconH1DecoderLayer: Layer,
    modeling.FalconH1Attention: Attention,
    modeling.FalconH1Mixer: StateSpace,
    modeling.FalconH1MLP: Mlp,
}


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """The logits are the head's output times ``lm_head_multiplier``."""
    return model.lm_head(model.norm(hidden)) * text_config(model).lm_head_multiplier
