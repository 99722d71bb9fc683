"""State-space mixers: Mamba-1's selective scan and Mamba-2's scalar-decay heads, in the names of linear attention."""

from torch import Tensor

from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import Unavailable, unavailable
from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import INPUTS, kernel_call
from nnterp.components.recurrence.layouts import (
    Gates,
    ScanAttention,
    ScanDecays,
    ScanQK,
    ScanState,
    ScanStates,
    ScanSteps,
    ScanValues,
    SSDKeys,
    SSDQueries,
    SSDValues,
)
from nnterp.components.recurrence.mixer import RecurrentMixer
from nnterp.components.recurrence.sources import compiled
from nnterp.components.recurrence.values import Coupled, entering

NO_STATE_VISITS = (
    "the scan computes the states of all tokens in one step, so there is none to visit: states_at has the state after "
    "chosen tokens, and states, after nnterp.chunk_per_token(model), after every token"
)
NO_STATE_WRITES = (
    "the scan computes the states of all tokens in one step from the one it starts from, so a state in between cannot "
    "be written: assign state_input, betas or decays"
)


def _betas(mixer: "SelectiveScan") -> ScanSteps:
    """The step size, ``softplus(dt + bias)``, ``[batch, seq, channels]``: how strongly each token writes. Read-only."""
    return mixer._inputs("betas")["betas"].clone()


def _decays(mixer: "SelectiveScan") -> ScanDecays:
    """The log of how much of the state each token keeps, ``A * betas``, ``[batch, seq, channels, state_dim]``, float32.
    Read-only.
    """
    betas = mixer._inputs("decays")["betas"]
    call = mixer._module_call()
    return call.mechanism.decays(call, betas)


class SelectiveScan(RecurrentMixer):
    """A Mamba-1 mixer: each channel carries a state of ``state_dim`` numbers. Per channel, with ``A`` negative rates::

        state = exp(A * beta) * state + beta * key * value
        output = query . state + D * value

    (Gu and Dao 2023, arXiv 2312.00752, algorithm 2: ``C`` is the query, ``B`` the key, ``x`` the value, ``dt`` the
    beta). The kernel's channels-first tensors are served tokens first. Its loop over tokens is transformers' own, so
    the state after each token is there unless another implementation runs.
    """

    MECHANISM = "selective_scan"
    CHUNK_KERNEL = "mamba_selective_scan"
    RECURRENT_KERNEL = "mamba_selective_state_update"
    TAPS = {INPUTS: kernel_call(MECHANISM, CHUNK_KERNEL, RECURRENT_KERNEL)}

    # -- availability -----------------------------------------------------------------------------------------------

    def needs_recurrent_routing(self) -> str | None:
        """Why the state after each token is not held, or None."""
        from transformers.utils.import_utils import is_mambapy_available

        if getattr(self._module, "use_mambapy", False) and is_mambapy_available():
            return "mambapy's parallel scan runs here, which holds no state by token: load with use_mambapy=False"
        return self.needs_torch_kernels()

    needs_token_loop = needs_recurrent_routing
    needs_pieces = needs_recurrent_routing

    def fresh_state(self, values: Tensor) -> Tensor | str:
        return "the scan of a prompt starts from zeros, whatever the cache holds; a decode step starts from a state"

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """Channels of the mixer's inner width, each with a state of its own."""
        return module_int(self, "intermediate_size")

    @property
    def state_dim(self) -> int:
        """Numbers in one channel's state."""
        return module_int(self, "ssm_state_size")

    @property
    def groups(self) -> int:
        """1: all channels share queries and keys."""
        return 1

    # -- values -----------------------------------------------------------------------------------------------------

    attention_queries = RecurrentMixer.attention_queries.at(layout=ScanQK)
    attention_keys = RecurrentMixer.attention_keys.at(layout=ScanQK)
    attention_values = RecurrentMixer.attention_values.at(layout=ScanValues)
    betas = DerivedEProperty(
        _betas,
        "How strongly each token writes",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="attention_values or attention_keys",
    )
    decays = DerivedEProperty(
        _decays,
        "The log of how much of the state each token keeps",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="a state, with set_state_after(token, value)",
    )
    state_input = RecurrentMixer.state_input.at(layout=ScanState)
    state = RecurrentMixer.state.at(layout=ScanState)
    states = RecurrentMixer.states.at(layout=ScanStates)
    effective_attention = RecurrentMixer.effective_attention.at(layout=ScanAttention)
    attention_head_outputs = RecurrentMixer.attention_head_outputs.at(layout=ScanValues)
    state_output = RecurrentMixer.state_output.at(layout=ScanState)


class StateSpace(RecurrentMixer):
    """A Mamba-2 mixer: linear attention with one scalar decay per head. Per head, with ``A`` a negative rate::

        state = exp(A * beta) * state + beta * key value^T
        output = state^T query + D * value

    (Dao and Gu 2024, arXiv 2405.21060: ``C`` is the query, ``B`` the key, ``x`` the value, ``dt`` the beta). Queries
    and keys are shared by the heads of a group. States are served key side first, the transpose of the cache's.
    """

    MECHANISM = "state_space"
    CHUNK_KERNEL = "mamba2_chunk_scan"
    RECURRENT_KERNEL = "mamba2_selective_state_update"
    TAPS = {INPUTS: kernel_call(MECHANISM, CHUNK_KERNEL, RECURRENT_KERNEL)}

    # -- availability -----------------------------------------------------------------------------------------------

    def needs_per_token_chunks(self) -> str | None:
        """Why the state after every token is not held, or None: every chunk of the scan is one token."""
        size = module_int(self, "chunk_size")
        if size != 1:
            return (
                f"the scan holds the state at the boundaries of chunks, and chunk_size is {size}: call "
                f"nnterp.chunk_per_token(model) first, or take those after chosen tokens with states_at"
            )
        kernel = self.kernel()
        return self.needs_torch_kernels() if kernel is not None and compiled(kernel) is not None else self.no_kernel()

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        """Heads of the state."""
        return module_int(self, "num_heads")

    @property
    def groups(self) -> int:
        """Groups of heads that share queries and keys."""
        return module_int(self, "n_groups")

    @property
    def head_dim(self) -> int:
        """Width of one head's values and outputs, which on a hybrid is not its softmax attention's."""
        return module_int(self, "head_dim")

    @property
    def state_dim(self) -> int:
        """Width of one group's queries and keys."""
        return module_int(self, "ssm_state_size")

    @property
    def key_dim(self) -> int:
        """The key side of the state: `state_dim`."""
        return self.state_dim

    @property
    def value_dim(self) -> int:
        """The value side of the state: `head_dim`."""
        return self.head_dim

    # -- values -----------------------------------------------------------------------------------------------------

    attention_queries = RecurrentMixer.attention_queries.at(layout=SSDQueries)
    attention_keys = RecurrentMixer.attention_keys.at(layout=SSDKeys)
    attention_values = RecurrentMixer.attention_values.at(layout=SSDValues)

    @entering("betas", "How strongly each token writes (dt)", Coupled)
    def betas(self, value: Tensor) -> Gates:
        """The step size, ``softplus(dt + bias)`` within the prompt's limits, ``[batch, seq, heads]``: how strongly each
        token writes, and by way of `decays` how much of the state it keeps.

        In-place edits and assignment reach the kernel as they are; zero leaves the state as it was.
        """
        return value

    @entering("decays", "The log of how much of the state each token keeps (A * dt)", Coupled)
    def decays(self, value: Tensor) -> Gates:
        """The log of what each token keeps of the state, ``A * betas``, ``[batch, seq, heads]``, float32, at most 0.

        The same quantity as `betas`: an edit of either, in place or assigned, is one of both.
        """
        return value

    state = unavailable(NO_STATE_VISITS)
    states = RecurrentMixer.states.at(unavailable=lambda mixer: mixer.needs_per_token_chunks())
    attention_head_outputs = RecurrentMixer.attention_head_outputs.at(layout=SSDValues)

    def state_after(self, token: int) -> Tensor:
        """The state after ``token`` of this call, ``[batch, heads, key_dim, value_dim]``: one of `states`.

        Raises IndexError for a token the call does not have, Unavailable for the reason that `states` is.
        """
        states = self.states
        return states[:, self._token("state_after", states.shape[1], token)]

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Raises Unavailable: no state inside a scan can be written."""
        raise Unavailable(
            f"set_state_after of {self.path} ({type(self._module).__name__}) is unavailable: {NO_STATE_WRITES}"
        )
