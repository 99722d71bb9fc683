"""Cohere (Command R): attention and MLP in parallel on one norm, scaled logits."""

from torch import Tensor
from transformers.models.cohere import modeling_cohere as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.ParallelLayer):
    """Cohere's block."""


class Attention(components.Attention):
    """Cohere's attention; with ``use_qk_norm`` its queries and keys are normed per head."""


class Mlp(components.Mlp):
    """Cohere's gated feed-forward."""


ENVOYS = {modeling.CohereDecoderLayer: Layer, modeling.CohereAttention: Attention, modeling.CohereMLP: Mlp}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The logits are the head's output times ``logit_scale``."""
    return model.lm_head(model.norm(hidden)) * text_config(model).logit_scale
