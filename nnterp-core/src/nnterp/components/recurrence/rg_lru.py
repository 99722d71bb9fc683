"""The real-gated linear recurrent unit (RG-LRU): one number per channel, kept by a gate that each token computes."""

from typing import Any

import torch
from jaxtyping import Float
from nnsight.intervention.interleaver import Mediator
from torch import Tensor

from nnterp.components.eproperty import DerivedEProperty, EProperty, unavailable
from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import FINAL, INPUTS, OUTPUTS, STATE_AT, STATES, kernel_call
from nnterp.components.recurrence.mechanisms import ANEW
from nnterp.components.recurrence.mixer import (
    FinalState,
    RecurrentMixer,
    StateInput,
    StatesEProperty,
    at_kernel,
    effective_attention,
    entering,
)
from nnterp.components.recurrence.state_space import ScanAttention, ScanValues
from nnterp.components.standard import Standard

#: One number per token and channel, ``[batch, seq, channels]``.
UnitValues = ScanValues
#: ``[batch, channels]``.
UnitState = Float[Tensor, "batch channels"]
#: One state per token, ``[batch, seq, channels]``.
UnitStates = Float[Tensor, "batch seq channels"]

NO_KEYS = (
    "each channel of the state takes up the value of its own channel and is read as it is: no key says where, no query "
    "what; attention_values are what a token writes, decays how much it keeps"
)
IN_THE_VALUES = "the input gate and its normalization are in attention_values: each is added to the state as it is"


def _unit_attention(mixer: "GatedRecurrence") -> ScanAttention:
    return effective_attention(mixer)


_unit_attention.__doc__ = effective_attention.__doc__.replace("heads, query", "channels, query")


class GatedUnit(Standard):
    """The module inside a `GatedRecurrence` that runs the recurrence: it hosts the locations of its values."""

    ROLE = "recurrent unit"
    TAPS = {INPUTS: kernel_call("gated_recurrence", "_rnn_scan", "_rnn_scan")}


class GatedRecurrence(RecurrentMixer):
    """An RG-LRU mixer: each channel carries a state of one number. Per channel::

        state = exp(decay) * state + value
        output = state

    (De et al. 2024, arXiv 2402.19427). The value is the token's input, gated and scaled by ``sqrt(1 - exp(2 *
    decay))``; an edit of `decays` leaves it as it was. Where a token's position is 0 the state starts anew: its decay
    is -inf. The recurrence is a loop over tokens, so the state after each token is there.
    """

    MECHANISM = "gated_recurrence"
    CHUNK_KERNEL = "_rnn_scan"
    RECURRENT_KERNEL = "_rnn_scan"
    KERNEL_HOST = "rg_lru."

    attention_queries = unavailable(NO_KEYS)
    attention_keys = unavailable(NO_KEYS)
    betas = unavailable(IN_THE_VALUES)

    def fresh_state(self, values: Tensor) -> Tensor | str:
        decays = Mediator.value(f"{self._host().path}.{INPUTS}")["decays"]
        if torch.isneginf(decays[:, 0]).all():
            return ANEW
        return values.new_zeros(values.shape[0], self.channels, dtype=torch.float32)

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """Channels of the recurrence, each with a state of its own."""
        return module_int(self, "lru_width")

    # -- values -----------------------------------------------------------------------------------------------------

    @entering("values", "What a token writes")
    def attention_values(self, value: Tensor) -> UnitValues:
        """What each token adds to the state, ``[batch, seq, channels]``: gated and normalized.

        In-place edits and assignment reach the model.
        """
        return value

    @entering("decays", "The log of how much of the state each token keeps")
    def decays(self, value: Tensor) -> UnitValues:
        """The log of how much of the state each token keeps, ``[batch, seq, channels]``, float32, at most 0; -inf where
        its position is 0, and the state starts anew.

        In-place edits and assignment reach the model.
        """
        return value

    @StateInput(
        at_kernel(INPUTS),
        "The state this call starts from; None where it starts anew",
        unavailable=lambda mixer: mixer.no_kernel(),
        select="state_input",
    )
    def state_input(self, value: Any) -> UnitState | None:
        """The state this call starts from, ``[batch, channels]``, float32; None where it starts anew, which is where
        its first token has position 0, and without a cache. Zero in the rows that start anew beside others that do not.

        A copy. Edit or assign it to start from another; raises ValueError where the call starts anew, unless `decays`
        were edited before to keep something of it.
        """
        return value

    @EProperty(
        at_kernel(STATE_AT),
        "The state after each token, one visit per token",
        unavailable=lambda mixer: mixer.needs_recurrent_routing(),
    )
    def state(self, value: Tensor) -> UnitState:
        """The state after a token of this call, ``[batch, channels]``, float32: one visit per token.

        ``for t in tracer.iter[:]`` walks them, ``tracer.iter[4]`` is the state after token 4; outside of either it is
        the one after token 0. An edit is what the token's own output and the following tokens go on from.
        """
        return value

    @StatesEProperty(
        at_kernel(STATES), "The state after every token", unavailable=lambda mixer: mixer.needs_recurrent_routing()
    )
    def states(self, value: Tensor) -> UnitStates:
        """The state after every token of this call, ``[batch, seq, channels]``, float32. Read-only, a copy."""
        return value

    effective_attention = DerivedEProperty(
        _unit_attention,
        "How much each token's value contributes to each later output",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="decays",
    )

    @EProperty(at_kernel(OUTPUTS), "The state as it is read", unavailable=lambda mixer: mixer.no_kernel())
    def attention_head_outputs(self, value: Tensor) -> UnitValues:
        """What is read of the state at each token, ``[batch, seq, channels]``: the state in the model's dtype, before
        the gate and the output projection. In-place edits and assignment reach the model.
        """
        return value

    @FinalState(at_kernel(FINAL), "The state after this call's last token", unavailable=lambda mixer: mixer.no_kernel())
    def state_output(self, value: Any) -> UnitState | None:
        """The state after this call's last token, ``[batch, channels]``, float32, as the module keeps it; None where no
        cache is kept.

        A copy. An edit changes what the next step starts from, and not this call's output.
        """
        return value
