"""What every recurrent mixer shares: its values, the state after each token, and its contribution."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from torch import Tensor

from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import EProperty, Unavailable
from nnterp.components.layouts import Residual
from nnterp.components.locations import FIRST, missed
from nnterp.components.recurrence.calls import (
    FINAL,
    INPUTS,
    OUTPUTS,
    STATE_AT,
    STATES,
    UNDER_WAY,
    KernelCall,
    align,
    token_location,
)
from nnterp.components.recurrence.layouts import EffectiveAttention, Gates, LinearQK, LinearV, State, States
from nnterp.components.recurrence.sources import compiled, package, plain
from nnterp.components.recurrence.values import (
    FinalState,
    StateInput,
    StatesEProperty,
    at_kernel,
    entering,
    served_at,
)
from nnterp.components.standard import Standard


def effective_attention(mixer: "RecurrentMixer") -> EffectiveAttention:
    """How much each token's value contributes to each later token's head output, ``[batch, heads, query, key]``.

    Float32, zero where the query is before the key. Contracted with `attention_values` it is what the recurrence reads
    of this call's own tokens: `attention_head_outputs`, less what comes of `state_input` and of a skip connection.
    Computed when it is read, from the values as they are then.
    """
    raw = mixer._inputs("effective_attention")
    mixer.settle(raw)
    call = mixer._module_call()
    return call.mechanism.effective_attention(call, raw)


class RecurrentMixer(Standard):
    """A sequence mixer with a recurrent state, read at the kernel call its forward makes.

    A subclass says which kernels those are and what their arguments mean (`MECHANISM`); its values then mean the same
    in a prompt, a decode step and several tokens over a cache. Tokens are counted from the call's own first. Layouts
    are a gated DeltaNet's; a mechanism that has others says so (``.at(layout=...)``).

    Attributes:
        MECHANISM: The name of the mechanism (`nnterp.components.recurrence.mechanisms`).
        CHUNK_KERNEL: The function that a prompt, or several tokens over a cache, run through.
        RECURRENT_KERNEL: The function that a decode step runs through.
        CONTRIBUTION: Where what the mixer adds to the stream is read, a path from the module.
        KERNEL_HOST: The path of the child whose forward calls the kernels, with a dot behind it; empty where it is the
            mixer's own.
    """

    ROLE = "mixer"
    MECHANISM = ""
    CHUNK_KERNEL = ""
    RECURRENT_KERNEL = ""
    CONTRIBUTION = "output"
    KERNEL_HOST = ""

    # -- availability -----------------------------------------------------------------------------------------------

    def kernel(self, step: bool = False) -> Any:
        """What the name of the prompt's kernel, or a decode step's, is bound to beside the mixer's class."""
        return getattr(
            sys.modules[type(self._module).__module__], self.RECURRENT_KERNEL if step else self.CHUNK_KERNEL, None
        )

    def no_kernel(self) -> str | None:
        """Why the kernel call of this mixer cannot be read, or None."""
        return self._host().tap_reason(INPUTS)

    def needs_torch_kernels(self) -> str | None:
        """Why there is nothing to read inside the kernels, or None: another package's run, compiled."""
        for step in (False, True):
            kernel = self.kernel(step)
            other = compiled(kernel) if kernel is not None else None
            if other is not None:
                return (
                    f"{plain(kernel).__name__} is {package(other)}'s compiled kernel here, which keeps it inside: "
                    f'nnterp.route_kernels(model.family, "torch") runs transformers\' own'
                )
        return self.no_kernel()

    def needs_recurrent_routing(self) -> str | None:
        """Why the state after each token is not held, or None."""
        return self.needs_torch_kernels()

    def fresh_state(self, values: Tensor) -> Tensor | str:
        """The state that a prompt with ``values`` starts from, zeros, or why it cannot start from another."""
        return values.new_zeros(values.shape[0], self.heads, self.key_dim, self.value_dim, dtype=torch.float32)

    # -- values -----------------------------------------------------------------------------------------------------

    @EProperty(lambda mixer: mixer.CONTRIBUTION, "What the mixer adds to the residual stream", select=FIRST)
    def attention_output(self, value: Tensor) -> Residual:
        """What the mixer adds to the residual stream, ``[batch, seq, hidden_size]``. In-place edits and assignment
        reach the model.
        """
        return value

    @entering("queries", "What reads the state")
    def attention_queries(self, value: Tensor) -> LinearQK:
        """What reads the state, ``[batch, seq, heads, key_dim]``, as the kernel receives it: after the convolution.

        Assign to replace it; in-place edits reach the model where torch allows them (views of one ``split`` refuse them
        under autograd).
        """
        return value

    @entering("keys", "Where a token writes")
    def attention_keys(self, value: Tensor) -> LinearQK:
        """Where each token writes, ``[batch, seq, heads, key_dim]``; writes as on `attention_queries`."""
        return value

    @entering("values", "What a token writes")
    def attention_values(self, value: Tensor) -> LinearV:
        """What each token writes, ``[batch, seq, heads, value_dim]``; writes as on `attention_queries`."""
        return value

    @entering("betas", "How strongly each token writes")
    def betas(self, value: Tensor) -> Gates:
        """How strongly each token writes, ``[batch, seq, heads]``. In-place edits and assignment reach the model."""
        return value

    @entering("decays", "The log of how much of the state each token keeps")
    def decays(self, value: Tensor) -> Gates:
        """The log of how much of the state each token keeps, ``[batch, seq, heads]``, float32, at most 0.

        In-place edits and assignment reach the model.
        """
        return value

    @entering("state_input", "The state this call starts from; None on a fresh prompt", StateInput)
    def state_input(self, value: Any) -> State | None:
        """The state this call starts from, ``[batch, heads, key_dim, value_dim]``; None on a fresh prompt.

        A copy, since the cache overwrites its own. Edit or assign it to start from another, on a fresh prompt as well
        where its kernel can; raises ValueError where it cannot, and for another shape.
        """
        return value

    @EProperty(
        at_kernel(STATE_AT),
        "The state after each token, one visit per token",
        unavailable=lambda mixer: mixer.needs_recurrent_routing(),
    )
    def state(self, value: Tensor) -> State:
        """The state after a token of this call, ``[batch, heads, key_dim, value_dim]``: one visit per token.

        ``for t in tracer.iter[:]`` walks them, ``tracer.iter[4]`` is the state after token 4; outside of either it is
        the one after token 0. An edit is what the token's own output and the following tokens go on from.
        """
        return value

    @StatesEProperty(
        at_kernel(STATES), "The state after every token", unavailable=lambda mixer: mixer.needs_recurrent_routing()
    )
    def states(self, value: Tensor) -> States:
        """The state after every token of this call, ``[batch, seq, heads, key_dim, value_dim]``. Read-only.

        A copy, with what was written to single states. `states_at` has some of them, at a fraction of the memory.
        """
        return value

    effective_attention = DerivedEProperty(
        effective_attention,
        "How much each token's value contributes to each later output",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="whichever of attention_queries, attention_keys, decays and betas can be here",
    )

    @served_at(OUTPUTS, "What the queries read")
    def attention_head_outputs(self, value: Tensor) -> LinearV:
        """What the queries read from the state, ``[batch, seq, heads, value_dim]``, with a scan's skip ``D * x``.

        Before any gate, norm and the output projection. In-place edits and assignment reach the model.
        """
        return value

    @served_at(FINAL, "The state after this call's last token", FinalState)
    def state_output(self, value: Any) -> State | None:
        """The state after this call's last token, ``[batch, heads, key_dim, value_dim]``, as the cache receives it;
        None where no cache is kept.

        A copy. An edit changes what the next step starts from, and not this call's output.
        """
        return value

    def settle(self, inputs: dict[str, Any]) -> None:
        """Make those of the kernel's ``inputs``, as they are served here, agree that are one quantity."""
        call, batcher, group = self._module_call(), self.interleaver.batcher, getcurrent().mediator().batch_group
        call.mechanism.settle(call, inputs, lambda whole: whole if batcher is None else batcher.narrow(whole, group))

    # -- the state after chosen tokens --------------------------------------------------------------------------------

    def _module_call(self) -> KernelCall | None:
        """The kernel call of this mixer that is under way."""
        return self._host()._module.__dict__.get(UNDER_WAY)

    def _host(self) -> Any:
        host = self
        for name in self.KERNEL_HOST.split(".")[:-1]:
            host = getattr(host, name)
        return host

    def _inputs(self, what: str) -> Any:
        """What the kernel computes from, waited for where the model has not come to it."""
        location = f"{self._host().path}.{INPUTS}"
        try:
            return Mediator.value(location)
        except OutOfOrderError as error:  # the same one, by which nnsight knows the end of a loop over steps
            error.args = (missed(f"{what} of {self.path}", location),)
            raise

    def _entered(self, what: str) -> KernelCall:
        """The kernel call under way, waited for where the model has not come to it, or not to the step asked for."""
        worker = getattr(getcurrent(), "mediator", None)
        if worker is None:
            raise ValueError(
                f"{what} of {self.path} exists only while the model runs: use it inside a `with model.trace(...):` "
                f"block"
            )
        call, step = self._module_call(), worker().iteration
        if call is None or (step is not None and call.index(worker()) < step):
            self._inputs(what)
            call = self._module_call()
        if call is None:
            raise OutOfOrderError(f"{what} of {self.path} was asked for after its kernel had run in this call")
        return call

    def _token(self, what: str, length: int, token: int) -> int:
        """``token`` counted from the first of a call of ``length`` tokens."""
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"{what} of {self.path} takes a token's number, not {token!r}")
        if not -length <= token < length:
            raise IndexError(f"{what} of {self.path}: this call has tokens 0 to {length - 1}, no {token}")
        return token % length

    def _state_location(self, what: str, call: KernelCall, token: int) -> str:
        """Where the state after ``token`` is about to be served."""
        if token < call.position:
            raise OutOfOrderError(
                f"{what} of {self.path}: the recurrence is past token {token}; ask for tokens in their order, and "
                f"before what comes out of the kernel"
            )
        location = token_location(self._host().path, token)
        align(getcurrent().mediator(), location, call)
        return location

    def states_at(self, tokens: Iterable[int]) -> Tensor:
        """The state after each of ``tokens`` of this call, ``[batch, len(tokens), *state]``, the others not held.

        Under any kernel that can start from a state: it then runs in pieces, from one of the tokens to the next, which
        rounds differently from running in one. ``tokens`` may be in any order and count from the end. Inside a trace,
        before `attention_head_outputs`. Read-only.

        Raises IndexError for a token the call does not have, Unavailable where the kernel has no state to start from.
        """
        reason = self.needs_pieces()
        if reason is not None:
            raise Unavailable(f"states_at of {self.path} ({type(self._module).__name__}) is unavailable: {reason}")
        if isinstance(tokens, int):
            raise TypeError(f"states_at of {self.path} takes a list of tokens' numbers: [{tokens!r}] for one")
        call = self._entered("states_at")
        wanted = [self._token("states_at", call.length, token) for token in tokens]
        found = {token: self._read("states_at", call, token) for token in sorted(set(wanted))}
        if not found:
            raise ValueError(f"states_at of {self.path} was given no token")
        return torch.stack([found[token] for token in wanted], dim=1)

    def needs_pieces(self) -> str | None:
        """Why the state after a chosen token cannot be had, or None."""
        return self.no_kernel()

    def _read(self, what: str, call: KernelCall, token: int) -> Tensor:
        """The state after ``token``, a copy where the kernel has come past it and its states are kept."""
        if token < call.position and call.kept is not None:
            batcher, mediator = self.interleaver.batcher, getcurrent().mediator()
            state = call.mechanism.served_state(call.kept[token])
            return (state if batcher is None else batcher.narrow(state, mediator.batch_group)).clone()
        return self._served_state(what, self._state_location(what, call, token), token)

    def _served_state(self, what: str, location: str, token: int) -> Tensor:
        try:
            return Mediator.value(location)
        except OutOfOrderError as error:
            error.args = (
                f"{what} of {self.path} was asked for when the kernel had run past token {token}: ask before what "
                f"comes out of the kernel, or in an invoke of its own",
            )
            raise

    def state_after(self, token: int) -> Tensor:
        """The state after ``token`` of this call, as the mixer's `state` is laid out; tokens count from its first.

        Inside a trace, in the order of the tokens. Negative numbers count from the call's end. Raises IndexError for a
        token the call does not have, Unavailable for the reason that `states` is.
        """
        self._need_states("state_after")
        call = self._entered("state_after")
        return self._read("state_after", call, self._token("state_after", call.length, token))

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Replace the state after ``token`` of this call: its own output and every later token go on from ``value``.

        The short convolution before the kernel still carries the tokens before, so what follows is not quite a fresh
        start. Raises ValueError for another shape, dtype or device, IndexError for a token the call does not have,
        Unavailable for the reason that `state` is.
        """
        self._need_states("set_state_after")
        call = self._entered("set_state_after")
        token = self._token("set_state_after", call.length, token)
        location = self._state_location("set_state_after", call, token)
        replaced = self._served_state("set_state_after", location, token)
        type(self).values()["state"].check(self, value, replaced)
        Mediator.swap(location, value)

    def _need_states(self, what: str) -> None:
        reason = type(self).state.reason(self)
        if reason is not None:
            raise Unavailable(f"{what} of {self.path} ({type(self._module).__name__}) is unavailable: {reason}")
