"""GraniteMoeHybrid: Granite's multipliers on Mamba-2 and attention blocks, with a mixture beside an MLP or without.

Where the config has experts, the block's ``mlp`` is the mixture, and the MLP beside it, ``shared_mlp``, its shared
expert; where it has none, ``shared_mlp`` is the ``mlp``.
"""

from typing import Any

from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "mamba": "linear_attn",
    "block_sparse_moe": "mlp",
    "activation": "act_fn",
    "output_linear": "down_proj",
}


class Layer(components.Layer):
    """GraniteMoeHybrid's block, which multiplies what it adds by ``residual_multiplier``."""

    TAPS = {
        **components.Layer.TAPS,
        "attention_term": components.product("residual_multiplier", 0),
        "mlp_term": components.product("residual_multiplier", 1),
    }
    # What the mixture and the shared expert are both called with, so that an edit reaches both.
    mlp_input = components.Layer.mlp_input.at("post_attention_layernorm.output")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._module.block_sparse_moe is None:
            self.__dict__["mlp"], self._aliases["mlp"] = self.shared_mlp, "shared_mlp"


class Attention(components.Attention):
    """GraniteMoeHybrid's attention: ``attention_multiplier`` scales its scores; rotary where the config says so."""

    CONTRIBUTION = "../attention_term"


class StateSpace(components.StateSpace):
    """GraniteMoeHybrid's Mamba-2 mixer."""

    CONTRIBUTION = "../attention_term"


class Mlp(components.Mlp):
    """The gated feed-forward of a block: its ``mlp``, or ``shared_mlp`` beside a mixture."""

    CONTRIBUTION = "../mlp_term"
    mlp_output = components.Mlp.mlp_output.at(
        components.Mlp.mlp_output.key, unavailable=lambda mlp: mlp.beside_mixture()
    )

    def beside_mixture(self) -> str | None:
        """Why this module has no contribution of its own, or None."""
        if self.parent._module.block_sparse_moe is None:
            return None
        return "the block scales and adds it with its mixture's: read shared_expert_output on mlp"


class Moe(components.Moe):
    """GraniteMoeHybrid's mixture; ``mlp_output`` is its output and the shared expert's, summed and multiplied."""

    SCORING = "topk_softmax"
    CONTRIBUTION = "../mlp_term"
    SHARED_EXPERTS = "../shared_mlp"
    shared_expert_output = components.Moe.shared_expert_output.at("../shared_mlp.output")


ENVOYS = {
    modeling.GraniteMoeHybridDecoderLayer: Layer,
    modeling.GraniteMoeHybridAttention: Attention,
    modeling.GraniteMoeHybridMambaLayer: StateSpace,
    modeling.GraniteMoeHybridMLP: Mlp,
    modeling.GraniteMoeHybridMoE: Moe,
    modeling.GraniteMoeHybridTopKRouter: components.Router,
}


def intermediate_size(model: Any) -> int:
    """Width of the MLP that every block has: the config's ``intermediate_size`` is one expert's."""
    return text_config(model).shared_intermediate_size


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """The logits are the head's output divided by ``logits_scaling``."""
    return model.lm_head(model.norm(hidden)) / text_config(model).logits_scaling
