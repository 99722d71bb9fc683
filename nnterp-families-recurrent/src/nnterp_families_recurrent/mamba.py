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


class Layer(components.MixerLayer):
    """Mamba's block."""


class SelectiveScan(components.SelectiveScan):
    """Mamba's mixer."""


ENVOYS = {modeling.MambaBlock: Layer, modeling.MambaMixer: SelectiveScan}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The head runs in its weights' dtype on a stream that may be float32, and gives float32 logits."""
    return model.lm_head(model.norm(hidden).to(model.lm_head._module.weight.dtype)).float()
