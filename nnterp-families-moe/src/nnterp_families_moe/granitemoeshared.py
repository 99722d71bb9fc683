"""GraniteMoeShared: Granite's multipliers, and a shared expert that is the block's, beside its mixture."""

from torch import Tensor
from transformers.models.granitemoeshared import modeling_granitemoeshared as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "block_sparse_moe": "mlp",
}


class Layer(components.Layer):
    """GraniteMoeShared's block, which multiplies what it adds by ``residual_multiplier``."""

    TAPS = {
        **components.Layer.TAPS,
        "attention_term": components.product("residual_multiplier", 0),
        "mlp_term": components.product("residual_multiplier", 1),
    }
    # What the mixture and the shared expert are both called with, so that an edit reaches both.
    mlp_input = components.Layer.mlp_input.at("post_attention_layernorm.output")


class Attention(components.Attention):
    """GraniteMoeShared's attention: ``attention_multiplier`` scales its scores."""

    CONTRIBUTION = "../attention_term"


class Moe(components.Moe):
    """GraniteMoeShared's mixture; ``mlp_output`` is its output and the shared expert's, summed and multiplied."""

    SCORING = "topk_softmax"
    CONTRIBUTION = "../mlp_term"
    SHARED_EXPERTS = "../shared_mlp"
    shared_expert_output = components.Moe.shared_expert_output.at("../shared_mlp.output")


ENVOYS = {
    modeling.GraniteMoeSharedDecoderLayer: Layer,
    modeling.GraniteMoeSharedAttention: Attention,
    modeling.GraniteMoeSharedMoE: Moe,
    modeling.GraniteMoeSharedTopKRouter: components.Router,
}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The logits are the head's output divided by ``logits_scaling``."""
    return model.lm_head(model.norm(hidden)) / text_config(model).logits_scaling
