"""Softmax attention: its contribution, its pattern, and what goes into and comes out of the mixing."""

import sys
from typing import Any

from torch import Tensor

from nnterp.components import interface
from nnterp.components.eproperty import EProperty
from nnterp.components.layouts import CrossKeys, CrossValues, HeadOutputs, Keys, Pattern, Queries, Residual, Values
from nnterp.components.locations import FIRST
from nnterp.components.module_sizes import in_width, module_int, out_width
from nnterp.components.standard import Standard

#: Why an attention that does its own arithmetic has no value that is read at the shared call.
NOT_ON_INTERFACE = "this attention does its own arithmetic and does not call transformers' attention interface"


class Attention(Standard):
    """A softmax-attention module.

    The queries, keys, values and head outputs are read at the module's call of transformers' attention interface, under
    every implementation; scores and probabilities exist inside an eager function only, so they need
    ``attn_implementation="eager"``. `off_interface` says why the call is not made, `needs_eager` why there is nothing
    inside it: the two places that decide. The premix is what enters the output projection (standard child ``o_proj``).

    Sizes are this block's own, read off the module, in and outside a trace.

    Attributes:
        CONTRIBUTION: Where what this module adds to the stream is read, a path from the module.
        SINK: Whether an attention sink takes part of each row, so that rows of the pattern sum to less than one.
        METHOD: The module's method that does what an eager attention function does, where the module looks none up:
            from ``(query, key, value, mask, ...)`` to ``(outputs, pattern)``, with the heads before the sequence.
    """

    ROLE = "attention"
    CONTRIBUTION = "output"
    PROJECTION = "o_proj"
    SINK: bool = False
    METHOD: str | None = None

    def install(self) -> None:
        super().install()
        interface.serve_lookups()
        if self.METHOD:
            interface.own_call(type(self._module), self.METHOD)

    # -- availability -----------------------------------------------------------------------------------------------

    def off_interface(self) -> str | None:
        """Why neither transformers' attention interface nor `METHOD` is called by this module, or None: it is."""
        if self.METHOD and (implementation := implementation_of(self)) != "eager":
            return f"{self.METHOD} is what eager attention calls, and this model runs {implementation!r}"
        return None

    def needs_eager(self) -> str | None:
        """Why there are no scores and probabilities to read in this module's attention call, or None."""
        reason = self.off_interface()
        if reason is not None:
            return reason
        implementation = implementation_of(self)
        if implementation != "eager":
            return (
                f"scores and probabilities exist in the eager attention only, and this model runs {implementation!r}: "
                f'load it with attn_implementation="eager"'
            )
        if interface.SCORES in self.TAPS:  # the module computes them in its own forward
            return None
        kind = type(self._module)
        eager = interface.own_call(kind, self.METHOD) if self.METHOD else eager_function(kind)
        copy = "no eager_attention_forward beside it" if eager is None else interface.eager_copy(eager)
        return f"its eager attention cannot be read inside: {copy}" if isinstance(copy, str) else None

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Width of one head's values and outputs: the module's ``v_head_dim`` where it has one, else its
        ``head_dim``.
        """
        width = module_int(self, "v_head_dim", "head_dim", "head_size")
        return width or in_width(self, "o_proj", "head_dim") // self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys: the module's ``qk_head_dim`` where it has one, else its
        ``head_dim``.
        """
        return module_int(self, "qk_head_dim", "head_dim", "head_size") or self.head_dim

    @property
    def num_heads(self) -> int:
        """Query heads: the module's own count, else the output projection's input width over `head_dim`."""
        count = module_int(self, "num_heads", "num_attention_heads", "n_heads", "n_head")
        width = module_int(self, "v_head_dim", "head_dim", "head_size")
        if count is None and width is None:  # each would be worked out from the other
            raise NotImplementedError(
                f"num_heads of {self.path} ({type(self._module).__name__}): the module says neither how many heads it "
                f"has nor how wide one is; the family has to define it"
            )
        return count or in_width(self, "o_proj", "num_heads") // width

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads as projected, before they are repeated for the query heads."""
        count = module_int(self, "num_key_value_heads", "num_kv_heads", "kv_heads")
        groups = module_int(self, "num_key_value_groups")
        if count is None and groups is not None:
            return self.num_heads // groups
        width = out_width(self, "k_proj")
        return count or (width // self.qk_head_dim if width else self.num_heads)

    # -- values -----------------------------------------------------------------------------------------------------

    @EProperty(
        interface.INPUTS, "The queries the heads score with", unavailable=lambda attn: attn.off_interface(), select=0
    )
    def attention_queries(self, value: Tensor) -> Queries:
        """The queries, ``[batch, num_heads, seq, qk_head_dim]``, after projection, norm and rotary embedding.

        Assign to replace them. In-place edits reach the model where torch allows them: the views that ``split`` makes
        (GPT-2) refuse them under autograd, so assign there.
        """
        return value

    @EProperty(
        interface.INPUTS, "The keys the heads score against", unavailable=lambda attn: attn.off_interface(), select=1
    )
    def attention_keys(self, value: Tensor) -> Keys:
        """The keys, ``[batch, num_kv_heads, seq, qk_head_dim]``, before they are repeated for the query heads.

        With a cache they are all the keys so far. An in-place edit stays in the cache, an assignment acts on this call
        alone; otherwise as `attention_queries`.
        """
        return value

    @EProperty(interface.INPUTS, "The values the heads mix", unavailable=lambda attn: attn.off_interface(), select=2)
    def attention_values(self, value: Tensor) -> Values:
        """The values, ``[batch, num_kv_heads, seq, head_dim]``, before they are repeated; otherwise as
        `attention_keys`.
        """
        return value

    @EProperty(
        interface.SCORES, "The scores entering the softmax, scaled and masked", unavailable=lambda a: a.needs_eager()
    )
    def attention_scores(self, value: Tensor) -> Pattern:
        """The scaled, masked scores entering the softmax, ``[batch, num_heads, query, key]``, before any attention
        sink.

        ``softmax(attention_scores)`` is `attention_probabilities` up to the cast to the model's dtype. Masked entries
        hold the dtype's minimum (or -inf): overwriting them lifts the mask. In-place edits and assignment reach the
        model.
        """
        return value

    @EProperty(
        interface.PROBABILITIES,
        "The attention pattern, as mixed with the values",
        unavailable=lambda a: a.needs_eager(),
    )
    def attention_probabilities(self, value: Tensor) -> Pattern:
        """The attention pattern, ``[batch, num_heads, query, key]``: what the values are mixed with.

        In the model's dtype, after dropout and with a sink's column already dropped. Rows sum to one, to less on a
        model with a sink (`SINK`). In-place edits and assignment reach the model and are used as written.
        """
        return value

    @EProperty(interface.HEAD_OUTPUTS, "Each head's mix of the values", unavailable=lambda attn: attn.off_interface())
    def attention_head_outputs(self, value: Tensor) -> HeadOutputs:
        """Each head's output before the heads are concatenated, ``[batch, seq, num_heads, head_dim]``.

        What the attention interface returns. In-place edits and assignment reach the model.
        """
        return value

    @EProperty("o_proj.input", description="What enters the output projection, per head")
    def attention_premix(self, value: Tensor) -> HeadOutputs:
        """What the output projection mixes, ``[batch, seq, num_heads, head_dim]``: a view of its input.

        `attention_head_outputs`, after whatever the family puts between (a gate, a norm). Available under every
        implementation. In-place edits and assignment reach the model.
        """
        return value.unflatten(-1, (self.num_heads, -1))

    @attention_premix.postprocess
    def attention_premix(self, value: Tensor) -> Tensor:
        return value.flatten(-2)

    @EProperty(
        lambda attn: attn.CONTRIBUTION, description="What the attention adds to the residual stream", select=FIRST
    )
    def attention_output(self, value: Tensor) -> Residual:
        """What the attention adds to the residual stream, ``[batch, seq, hidden_size]``.

        The module's output, or wherever the family's block computes the term it adds. In-place edits and assignment
        reach the model.
        """
        return value


class CrossAttention(Attention):
    """Attention of the prompt's tokens to something else, an image's features: a block's ``cross_attn``.

    Queries, head outputs and `attention_output` are the tokens'. Keys, values and the last axis of scores and pattern
    run along what is attended to; nothing is causal there.
    """

    @EProperty(interface.INPUTS, "The keys of what is attended to", unavailable=lambda a: a.off_interface(), select=1)
    def attention_keys(self, value: Tensor) -> CrossKeys:
        """The keys, ``[batch, num_kv_heads, key, qk_head_dim]``, one for each position of what is attended to.

        Before they are repeated for the query heads. They are computed once and kept in the cache: an in-place edit
        stays there, an assignment acts on this call alone.
        """
        return value

    @EProperty(interface.INPUTS, "The values of what is attended to", unavailable=lambda a: a.off_interface(), select=2)
    def attention_values(self, value: Tensor) -> CrossValues:
        """The values, ``[batch, num_kv_heads, key, head_dim]``, before they are repeated; otherwise as
        `attention_keys`.
        """
        return value


def implementation_of(envoy: Any) -> str | None:
    """The attention implementation the module runs with: its own config's, else the model's."""
    config = getattr(envoy._module, "config", None) or getattr(envoy.root._module, "config", None)
    return getattr(config, "_attn_implementation", None)


def eager_function(kind: type) -> Any:
    """The eager function beside the class ``kind`` or a class it is made from, which is what the interface falls
    back to.
    """
    for klass in kind.__mro__:
        found = getattr(sys.modules.get(klass.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None
