"""Mixtral: a mixture in every block; softmax over the experts, the top k renormalised."""

from transformers.models.mixtral import modeling_mixtral as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm", "gate": "router"}


class Layer(components.Layer):
    """Mixtral's block."""


class Attention(components.Attention):
    """Mixtral's attention."""


class Moe(components.Moe):
    """Mixtral's mixture."""


ENVOYS = {
    modeling.MixtralDecoderLayer: Layer,
    modeling.MixtralAttention: Attention,
    modeling.MixtralSparseMoeBlock: Moe,
    modeling.MixtralTopKRouter: components.Router,
}
