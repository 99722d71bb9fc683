"""Mllama's text model (Llama 3.2 Vision): Llama's block, and at some places a block that attends to an image instead.

No image is scattered among the tokens: a cross-attention block reads the projected features of the tower as keys and
values. It multiplies what it adds by the ``tanh`` of two gates, and its MLP's by a mask of the tokens that see an image
at all; both are read behind that, so ``layer_input + attention_output + mlp_output == layer_output``.

The model passes by these blocks where there is no image, neither in the call nor in the cache: `layer_input` and
`layer_output` are then the one stream, and nothing else of them is served.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.mllama import modeling_mllama as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}

#: What to say of a value that a text has not.
ABSENT = (
    "It is inside a block that attends to an image, which the model passes by where there is none: trace the prompt "
    "with its image, or with cross_attention_states="
)


class TextModel(components.Standard):
    """The decoder, at whose loop the blocks are passed by."""

    TAPS = {"passed_by": components.passed_by("layers")}


class Layer(components.Layer):
    """Mllama's self-attention block, Llama's."""


class CrossAttentionLayer(components.Layer):
    """Mllama's cross-attention block: its attention is ``cross_attn``, and it has no ``self_attn``."""

    ABSENT = ABSENT
    TAPS = {
        **components.Layer.TAPS,
        "attention_term": components.product("cross_attn_attn_gate"),
        "mlp_term": components.product("cross_attn_mlp_gate"),
    }


class Attention(components.Attention):
    """Mllama's attention on the tokens."""


class CrossAttention(components.CrossAttention):
    """Mllama's attention to an image: queries and keys are normed, and have no positions."""

    ABSENT = ABSENT
    CONTRIBUTION = "../attention_term"


def added(mlp: components.Mlp) -> str:
    """Where what the block adds for its MLP is read: behind the gate of the block that has one."""
    return "../mlp_term" if isinstance(mlp.parent, CrossAttentionLayer) else "output"


class Mlp(components.Mlp):
    """Mllama's gated feed-forward."""

    mlp_output = components.Mlp.mlp_output.at(added)

    @property
    def ABSENT(self) -> str:  # noqa: N802
        """Its block's."""
        return getattr(self.parent, "ABSENT", "")


ENVOYS = {
    modeling.MllamaTextModel: TextModel,
    modeling.MllamaSelfAttentionDecoderLayer: Layer,
    modeling.MllamaCrossAttentionDecoderLayer: CrossAttentionLayer,
    modeling.MllamaTextSelfAttention: Attention,
    modeling.MllamaTextCrossAttention: CrossAttention,
    modeling.MllamaTextMLP: Mlp,
}


def probe_inputs(model: Any, rows: int) -> dict[str, Tensor]:
    """Features of an image, with which the cross-attention blocks run too."""
    return {"cross_attention_states": torch.zeros(rows, 3, model.hidden_size, dtype=model._module.dtype)}


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """Norm and head; the causal language model alone returns its logits in float32."""
    logits = model.lm_head(model.norm(hidden))
    return logits.float() if isinstance(model._module, modeling.MllamaForCausalLM) else logits
