"""Mistral on vLLM: fused blocks, with a window of keys or without."""

from vllm.model_executor.models import mistral as modeling
from vllm.model_executor.models.llama import LlamaMLP

from nnterp_vllm import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.FusedLayer):
    """Mistral's block."""


class Attention(components.Attention):
    """Mistral's attention."""


class Mlp(components.Mlp):
    """Mistral's gated feed-forward."""


ENVOYS = {
    modeling.MistralDecoderLayer: Layer,
    modeling.MistralAttention: Attention,
    LlamaMLP: Mlp,
}
