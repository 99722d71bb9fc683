"""The real-gated linear recurrent unit (RG-LRU): one number per channel, kept by a gate that each token computes."""

import torch
from torch import Tensor

from nnterp.components.eproperty import unavailable
from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import INPUTS, kernel_call
from nnterp.components.recurrence.layouts import ScanAttention, UnitState, UnitStates, UnitValues
from nnterp.components.recurrence.mechanisms import ANEW
from nnterp.components.recurrence.mixer import RecurrentMixer
from nnterp.components.standard import Standard

NO_KEYS = (
    "each channel of the state takes up the value of its own channel and is read as it is: no key says where, no query "
    "what; attention_values are what a token writes, decays how much it keeps"
)
IN_THE_VALUES = "the input gate and its normalization are in attention_values: each is added to the state as it is"


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
    is -inf, `state_input` is None, and assigning one raises ValueError unless `decays` were edited before to keep
    something of it; beside rows that do not start anew it is zero. The recurrence is a loop over tokens, so the state
    after each token is there.
    """

    MECHANISM = "gated_recurrence"
    CHUNK_KERNEL = "_rnn_scan"
    RECURRENT_KERNEL = "_rnn_scan"
    KERNEL_HOST = "rg_lru."

    def fresh_state(self, values: Tensor) -> Tensor | str:
        decays = self._inputs("state_input")["decays"]
        if torch.isneginf(decays[:, 0]).all():
            return ANEW
        return values.new_zeros(values.shape[0], self.channels, dtype=torch.float32)

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """Channels of the recurrence, each with a state of its own."""
        return module_int(self, "lru_width")

    # -- values -----------------------------------------------------------------------------------------------------

    attention_queries = unavailable(NO_KEYS)
    attention_keys = unavailable(NO_KEYS)
    attention_values = RecurrentMixer.attention_values.at(layout=UnitValues)
    decays = RecurrentMixer.decays.at(layout=UnitValues)
    betas = unavailable(IN_THE_VALUES)
    state_input = RecurrentMixer.state_input.at(layout=UnitState)
    state = RecurrentMixer.state.at(layout=UnitState)
    states = RecurrentMixer.states.at(layout=UnitStates)
    effective_attention = RecurrentMixer.effective_attention.at(layout=ScanAttention)
    attention_head_outputs = RecurrentMixer.attention_head_outputs.at(layout=UnitValues)
    state_output = RecurrentMixer.state_output.at(layout=UnitState)
