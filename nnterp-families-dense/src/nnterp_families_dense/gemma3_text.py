"""Gemma 3's text model: Gemma 2's block with norms on queries and keys, and no cap on the scores."""

from typing import Any

from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as modeling

from nnterp import components
from nnterp.root import soft_capped

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """Gemma 3's block: ``post_attention_layernorm`` norms what the attention adds, not what the MLP receives."""

    TAPS = components.mid_at("pre_feedforward_layernorm")
    mlp_norm_output = components.Layer.mlp_norm_output.at("pre_feedforward_layernorm.output")


class Attention(components.Attention):
    """Gemma 3's attention: the block adds its normed output."""

    CONTRIBUTION = "../post_attention_layernorm.output"


class Mlp(components.Mlp):
    """Gemma 3's gated feed-forward; the block adds its normed output."""

    CONTRIBUTION = "../post_feedforward_layernorm.output"


ENVOYS = {modeling.Gemma3DecoderLayer: Layer, modeling.Gemma3Attention: Attention, modeling.Gemma3MLP: Mlp}


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """Norm and head, and the text config's cap in the causal language model alone: the multimodal one has none."""
    logits = model.lm_head(model.norm(hidden))
    return soft_capped(model, logits) if isinstance(model._module, modeling.Gemma3ForCausalLM) else logits
