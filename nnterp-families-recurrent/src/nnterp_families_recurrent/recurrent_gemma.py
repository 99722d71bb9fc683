"""RecurrentGemma (Griffin): real-gated linear recurrent units, with local attention in every third block.

Both are the block's ``temporal_block`` in transformers. A recurrence's state is kept on its module, from one call to
the next, and starts anew at position 0. Padding is not masked before the short convolution: the first tokens behind
left padding differ from what they are in a prompt alone, in the model as in its values. So does a prompt of one token
in ``generate``, whose convolution goes on from what the module kept of the run before.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.final_norm": "norm",
    modeling.RecurrentGemmaRecurrentBlock: "linear_attn",
    modeling.RecurrentGemmaAttention: "self_attn",
    "mlp_block": "mlp",
    "temporal_pre_norm": "input_layernorm",
    "channel_pre_norm": "post_attention_layernorm",
}


class Layer(components.Layer):
    """RecurrentGemma's block, with a recurrence or with local attention."""


class Attention(components.Attention):
    """RecurrentGemma's attention, over a window of tokens; half of each head is rotated."""


class GatedRecurrence(components.GatedRecurrence):
    """RecurrentGemma's recurrence; a branch beside it gates what it gives."""


class Mlp(components.Mlp):
    """RecurrentGemma's gated feed-forward."""


ENVOYS = {
    modeling.RecurrentGemmaDecoderLayer: Layer,
    modeling.RecurrentGemmaAttention: Attention,
    modeling.RecurrentGemmaRecurrentBlock: GatedRecurrence,
    modeling.RecurrentGemmaRglru: components.GatedUnit,
    modeling.RecurrentGemmaMlp: Mlp,
}


def intermediate_size(model: Any) -> int:
    """Width of the feed-forward: half of the config's ``intermediate_size``."""
    return text_config(model).intermediate_size // 2


def project_on_vocab(model: Any, hidden: Tensor) -> Tensor:
    """The logits are the head's output, soft-capped."""
    cap = text_config(model).logits_soft_cap
    return torch.tanh(model.lm_head(model.norm(hidden)) / cap) * cap
