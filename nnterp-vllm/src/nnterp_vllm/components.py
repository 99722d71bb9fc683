"""The components of a decoder on the engine: the values of `nnterp.components` where vLLM's modules have them."""

from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor

from nnterp import components
from nnterp.components.eproperty import DerivedEProperty, Unavailable, unavailable
from nnterp.components.layouts import Pattern
from nnterp.components.locations import FIRST
from nnterp_vllm.values import Halves, Stream, on_engine

#: Why a value is not there on fused modules.
FUSED_ACTIVATION = "the engine's activation multiplies by the up projection in the same operation: read mlp_neurons"
KERNEL = "it is inside the engine's kernel"


class Layer(components.Layer):
    """A block that takes and returns the stream whole, ``[tokens, hidden_size]``.

    Attributes:
        HALVES: Where the stream is among the block's arguments, by position and keyword: what was added last, and the
            rest, which is not there in a block that takes it whole.
        FUSED: Whether the stream comes and goes in two halves.
    """

    HALVES: Halves = ((0, "hidden_states"), (1, "residual"))
    FUSED: bool = False

    layer_input = on_engine(components.Layer.layer_input, "inputs", Stream)
    attention_norm_output = on_engine(components.Layer.attention_norm_output, select=FIRST)
    layer_mid = on_engine(components.Layer.layer_mid)
    mlp_norm_output = on_engine(components.Layer.mlp_norm_output, select=FIRST)
    mlp_input = on_engine(components.Layer.mlp_input)
    layer_output = on_engine(components.Layer.layer_output, "output", Stream)

    def _count_in_cache(self, hidden: Tensor) -> None:
        """The engine's cache is its own."""

    def _returned(self, hidden: Tensor) -> Any:
        hidden = hidden.flatten(0, 1)
        return (torch.zeros_like(hidden), hidden) if self.FUSED else hidden


class FusedLayer(Layer):
    """A block that is called with ``(positions, hidden_states, residual)`` and returns the last two, each step's sum
    left to the next norm: the stream is their sum.
    """

    HALVES = ((1, "hidden_states"), (2, "residual"))
    FUSED = True
    #: Where they are in the call of the norm between the sublayers.
    NORM_HALVES: Halves = ((0, "x"), (1, "residual"))
    TAPS = {}
    layer_mid = on_engine(
        components.Layer.layer_mid, "post_attention_layernorm.inputs", Stream, halves="NORM_HALVES", unavailable=None
    )


def _recomputed(attention: "Attention") -> tuple[Tensor, torch.dtype]:
    """The scores of this step's queries and keys in float32, and the dtype of the queries."""
    queries, keys = attention.attention_queries, attention.attention_keys
    layer = attention.attn._module
    refuse_decode_step(attention, queries.shape[2])
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2)) * layer.impl.scale
    cap = getattr(layer.impl, "logits_soft_cap", None)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    behind = torch.arange(scores.shape[-1], device=scores.device)
    behind = behind[:, None] - behind
    hidden = behind < 0
    if layer.sliding_window:
        hidden = hidden | (behind >= layer.sliding_window)
    return scores.masked_fill(hidden, float("-inf")), queries.dtype


def refuse_decode_step(attention: "Attention", tokens: int) -> None:
    """Raise Unavailable where the keys of this request's earlier tokens are in the engine's cache."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    metadata = metadata[attention.attn._module.layer_name] if isinstance(metadata, dict) else metadata
    row = getcurrent().mediator().row
    if int(metadata.seq_lens[row]) != tokens:
        raise Unavailable(
            f"the scores and the pattern of {attention.path} are unavailable on a decode step: they are computed again "
            f"from queries and keys, and those of earlier tokens are in the engine's cache"
        )


def _scores(attention: "Attention") -> Pattern:
    """The scaled, masked scores, ``[1, num_heads, query, key]``, in the model's dtype; hidden keys hold ``-inf``.

    Computed again from the queries and keys of a prompt: what the kernel computes stays inside it. Read-only; raises
    Unavailable on a decode step, whose earlier keys are in the engine's cache.
    """
    scores, dtype = _recomputed(attention)
    return scores.to(dtype)


def _probabilities(attention: "Attention") -> Pattern:
    """The pattern, ``[1, num_heads, query, key]``, in the model's dtype: the softmax of `attention_scores`, in float32.

    Computed again as they are, and read-only like them.
    """
    scores, dtype = _recomputed(attention)
    return scores.softmax(-1).to(dtype)


class Attention(components.Attention):
    """An attention whose mixing is a module of the engine, ``attn``: queries, keys and values go into it, head outputs
    come out. This step's tokens alone: on a decode step the new one's.
    """

    attention_queries = on_engine(
        components.Attention.attention_queries, "attn.inputs", unavailable=None, select=(0, "query")
    )
    attention_keys = on_engine(components.Attention.attention_keys, "attn.inputs", unavailable=None, select=(1, "key"))
    attention_values = on_engine(
        components.Attention.attention_values, "attn.inputs", unavailable=None, select=(2, "value")
    )
    attention_scores = DerivedEProperty(_scores, "The scores, computed again from queries and keys")
    attention_probabilities = DerivedEProperty(_probabilities, "The pattern, computed again from queries and keys")
    attention_head_outputs = on_engine(components.Attention.attention_head_outputs, "attn.output", unavailable=None)
    attention_premix = on_engine(components.Attention.attention_premix)
    attention_output = on_engine(components.Attention.attention_output)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attn._module.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.attn._module.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.attn._module.head_size

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys."""
        return self.attn._module.head_size


class Mlp(components.Mlp):
    """A gated feed-forward, whose activation multiplies by the up projection in the same operation."""

    mlp_activation = unavailable(FUSED_ACTIVATION)
    mlp_neurons = on_engine(components.Mlp.mlp_neurons)
    mlp_output = on_engine(components.Mlp.mlp_output)


class PlainMlp(Mlp):
    """A feed-forward that is not gated: its activation is what the down projection sums."""

    mlp_activation = on_engine(components.Mlp.mlp_activation)
