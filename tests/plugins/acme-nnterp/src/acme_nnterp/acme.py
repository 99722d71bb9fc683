"""Acme: one norm feeds attention and feed-forward side by side, and both are added to the stream."""

from acme_nnterp import _modeling as modeling
from nnterp import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "pre_norm": "input_layernorm",
    "mixer": "self_attn",
    "ffn": "mlp",
}


class Layer(components.ParallelLayer):
    """Acme's block."""


class Attention(components.Attention):
    """Acme's attention, which is Llama's."""


class Mlp(components.Mlp):
    """Acme's feed-forward, which is Llama's."""


ENVOYS = {modeling.AcmeBlock: Layer, modeling.AcmeAttention: Attention, modeling.AcmeMLP: Mlp}
