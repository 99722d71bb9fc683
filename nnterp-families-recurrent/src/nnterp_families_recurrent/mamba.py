"""Mamba: blocks of one norm and one selective scan."""

from torch import Tensor
from transformers.models.mamba import modeling_mamba as modeling

from nnterp import components

RENAME = {
    "norm": "input_layernorm",
    "backbone.embeddings": "embed_tokens",
    "backbone.layers": "layers",
    "backbone.norm_f": "norm",
    "mixer": "linear_attn",
}

ONE_SUBLAYER = "the block is one mixer on the stream, with no feed-forward behind it"


class Layer(components.Layer):
    """Mamba's block: ``layer_input + attention_output``."""

    TAPS = {}
    layer_mid = components.unavailable(ONE_SUBLAYER)
    mlp_norm_output = components.unavailable(ONE_SUBLAYER)
    mlp_input = components.unavailable(ONE_SUBLAYER)


class SelectiveScan(components.SelectiveScan):
    """Mamba's mixer."""


ENVOYS = {modeling.MambaBlock: Layer, modeling.MambaMixer: SelectiveScan}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The head runs in its weights' dtype on a stream that may be float32, and gives float32 logits."""
    return model.lm_head(model.norm(hidden).to(model.lm_head._module.weight.dtype)).float()
