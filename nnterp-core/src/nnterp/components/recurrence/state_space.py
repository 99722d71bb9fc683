"""State-space mixers: Mamba-1's selective scan and Mamba-2's scalar-decay heads, in the names of linear attention."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nnterp.components.eproperty import DerivedEProperty, EProperty, Unavailable, unavailable
from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import FINAL, INPUTS, OUTPUTS, STATE_AT, STATES, kernel_call
from nnterp.components.recurrence.linear_attention import Gates, State, States
from nnterp.components.recurrence.mixer import (
    Coupled,
    FinalState,
    RecurrentMixer,
    StateInput,
    StatesEProperty,
    at_kernel,
    effective_attention,
    entering,
)
from nnterp.components.recurrence.sources import compiled

#: ``[batch, seq, groups, state_dim]``; Mamba-1 has one group.
ScanQK = Float[Tensor, "batch seq groups state_dim"]
#: ``[batch, seq, channels]``.
ScanValues = Float[Tensor, "batch seq channels"]
#: One step size per token and channel, ``[batch, seq, channels]``.
ScanSteps = Float[Tensor, "batch seq channels"]
#: ``[batch, seq, channels, state_dim]``.
ScanDecays = Float[Tensor, "batch seq channels state_dim"]
#: ``[batch, channels, state_dim]``.
ScanState = Float[Tensor, "batch channels state_dim"]
#: One state per token, ``[batch, seq, channels, state_dim]``.
ScanStates = Float[Tensor, "batch seq channels state_dim"]
#: One matrix per channel and pair of tokens, ``[batch, channels, query, key]``.
ScanAttention = Float[Tensor, "batch channels query key"]

SSDQueries = ScanQK
SSDKeys = ScanQK
#: ``[batch, seq, heads, head_dim]``.
SSDValues = Float[Tensor, "batch seq heads head_dim"]
SSDHeadOutputs = SSDValues

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


def _scan_attention(mixer: "SelectiveScan") -> ScanAttention:
    return effective_attention(mixer)


_scan_attention.__doc__ = effective_attention.__doc__.replace("heads, query", "channels, query")


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

    @entering("queries", "What reads the state (C)")
    def attention_queries(self, value: Tensor) -> ScanQK:
        """``C``, what reads the state, ``[batch, seq, 1, state_dim]``.

        Assign to replace it; in-place edits are refused under autograd (views of one ``split``).
        """
        return value

    @entering("keys", "Where a token writes (B)")
    def attention_keys(self, value: Tensor) -> ScanQK:
        """``B``, where a token writes, ``[batch, seq, 1, state_dim]``. Writes as on `attention_queries`."""
        return value

    @entering("values", "What a token writes (x)")
    def attention_values(self, value: Tensor) -> ScanValues:
        """``x``, what a token writes and what skips the scan times ``D``, ``[batch, seq, channels]``.

        In-place edits and assignment reach the model.
        """
        return value

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

    @StateInput(
        at_kernel(INPUTS),
        "The state a decode step starts from; None on a prompt",
        unavailable=lambda mixer: mixer.no_kernel(),
        select="state_input",
    )
    def state_input(self, value: Any) -> ScanState | None:
        """The state a decode step starts from, ``[batch, channels, state_dim]``; None on a prompt, whose scan starts
        from zeros.

        A copy. Edit or assign it to start from another; raises ValueError on a prompt.
        """
        return value

    @EProperty(
        at_kernel(STATE_AT),
        "The state after each token, one visit per token",
        unavailable=lambda mixer: mixer.needs_recurrent_routing(),
    )
    def state(self, value: Tensor) -> ScanState:
        """The state after a token of this call, ``[batch, channels, state_dim]``: one visit per token.

        ``for t in tracer.iter[:]`` walks them, ``tracer.iter[4]`` is the state after token 4; outside of either it is
        the one after token 0. An edit is what the token's own output and the following tokens go on from.
        """
        return value

    @StatesEProperty(
        at_kernel(STATES), "The state after every token", unavailable=lambda mixer: mixer.needs_recurrent_routing()
    )
    def states(self, value: Tensor) -> ScanStates:
        """The state after every token of this call, ``[batch, seq, channels, state_dim]``. Read-only, a copy."""
        return value

    effective_attention = DerivedEProperty(
        _scan_attention,
        "How much each token's value contributes to each later output",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="attention_queries or attention_keys",
    )

    @EProperty(at_kernel(OUTPUTS), "What the scan gives, before the gate", unavailable=lambda mixer: mixer.no_kernel())
    def attention_head_outputs(self, value: Tensor) -> ScanValues:
        """``y``, what the queries read and the skip ``D * x``, ``[batch, seq, channels]``, before the gate ``silu(z)``
        and the output projection. In-place edits and assignment reach the model.
        """
        return value

    @FinalState(at_kernel(FINAL), "The state after this call's last token", unavailable=lambda mixer: mixer.no_kernel())
    def state_output(self, value: Any) -> ScanState | None:
        """The state after this call's last token, ``[batch, channels, state_dim]``, as the cache receives it; None
        where no cache is kept. A copy: an edit changes what the next step starts from, and not this call's output.
        """
        return value


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

    def fresh_state(self, values: Tensor) -> Tensor | str:
        return values.new_zeros(values.shape[0], self.heads, self.state_dim, self.head_dim, dtype=torch.float32)

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

    @entering("queries", "What reads the state (C)")
    def attention_queries(self, value: Tensor) -> SSDQueries:
        """``C``, what reads the state, ``[batch, seq, groups, state_dim]``.

        Assign to replace it; in-place edits are refused under autograd (views of one ``split``).
        """
        return value

    @entering("keys", "Where a token writes (B)")
    def attention_keys(self, value: Tensor) -> SSDKeys:
        """``B``, where a token writes, ``[batch, seq, groups, state_dim]``. Writes as on `attention_queries`."""
        return value

    @entering("values", "What a token writes (x)")
    def attention_values(self, value: Tensor) -> SSDValues:
        """``x``, what a token writes, ``[batch, seq, heads, head_dim]``. Writes as on `attention_queries`."""
        return value

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

    @StateInput(
        at_kernel(INPUTS),
        "The state this call starts from; None on a fresh prompt",
        unavailable=lambda mixer: mixer.no_kernel(),
        select="state_input",
    )
    def state_input(self, value: Any) -> State | None:
        """The state this call starts from, ``[batch, heads, key_dim, value_dim]``; None on a fresh prompt.

        A copy, the transpose of the cache's. Edit or assign it to start from another, on a fresh prompt as well; raises
        ValueError for another shape.
        """
        return value

    state = unavailable(NO_STATE_VISITS)

    @StatesEProperty(
        at_kernel(STATES), "The state after every token", unavailable=lambda mixer: mixer.needs_per_token_chunks()
    )
    def states(self, value: Tensor) -> States:
        """The state after every token of this call, ``[batch, seq, heads, key_dim, value_dim]``. Read-only, a copy.

        Held where every chunk is one token, ``nnterp.chunk_per_token(model)``, at a cost quadratic in the tokens;
        `states_at` has some of them without.
        """
        return value

    def state_after(self, token: int) -> Tensor:
        """The state after ``token`` of this call, ``[batch, heads, key_dim, value_dim]``: one of `states`.

        Raises IndexError for a token the call does not have, Unavailable for the reason that `states` is.
        """
        states = self.states
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"state_after of {self.path} takes a token's number, not {token!r}")
        if not -states.shape[1] <= token < states.shape[1]:
            raise IndexError(f"state_after of {self.path}: this call has tokens 0 to {states.shape[1] - 1}, no {token}")
        return states[:, token]

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Raises Unavailable: no state inside a scan can be written."""
        raise Unavailable(
            f"set_state_after of {self.path} ({type(self._module).__name__}) is unavailable: {NO_STATE_WRITES}"
        )

    effective_attention = DerivedEProperty(
        effective_attention,
        "How much each token's value contributes to each later output",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="attention_queries, attention_keys, decays or betas",
    )

    @EProperty(at_kernel(OUTPUTS), "What the scan gives", unavailable=lambda mixer: mixer.no_kernel())
    def attention_head_outputs(self, value: Tensor) -> SSDHeadOutputs:
        """``y``, what the queries read and the skip ``D * x``, ``[batch, seq, heads, head_dim]``, before the gated norm
        and the output projection. In-place edits and assignment reach the model.
        """
        return value

    @FinalState(at_kernel(FINAL), "The state after this call's last token", unavailable=lambda mixer: mixer.no_kernel())
    def state_output(self, value: Any) -> State | None:
        """The state after this call's last token, ``[batch, heads, key_dim, value_dim]``, as the cache receives it;
        None where no cache is kept. A copy: an edit changes what the next step starts from, and not this call's output.
        """
        return value
