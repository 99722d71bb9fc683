"""What every recurrent mixer shares: where its values are read, the state after each token, and its contribution."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from greenlet import getcurrent
from jaxtyping import Float
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from torch import Tensor

from nnterp.components.eproperty import EProperty, Unavailable
from nnterp.components.layouts import Residual
from nnterp.components.locations import FIRST, missed
from nnterp.components.recurrence.calls import INPUTS, UNDER_WAY, KernelCall, align, token_location
from nnterp.components.recurrence.sources import compiled, package, plain
from nnterp.components.standard import Standard

#: One matrix per head and pair of tokens, ``[batch, heads, query, key]``.
EffectiveAttention = Float[Tensor, "batch heads query key"]


def at_kernel(name: str) -> Any:
    """The key of a value that is served at ``name`` by the kernel call of its mixer."""
    return lambda mixer: f"{mixer.KERNEL_HOST}{name}"


def entering(value: str, description: str, kind: type[EProperty] = EProperty) -> EProperty:
    """A value that the kernel computes from, the one it calls ``value``."""
    return kind(at_kernel(INPUTS), description, unavailable=lambda mixer: mixer.no_kernel(), select=value)


class Coupled(EProperty):
    """A value that is one quantity with another: after an edit of either, both are read as what it implies."""

    def _served(self, obj: Any, location: str) -> Any:
        raw = super()._served(obj, location)
        obj.settle(raw)
        return raw

    def __set__(self, obj: Any, value: Any) -> None:
        super().__set__(obj, value.clone() if isinstance(value, Tensor) else value)
        obj._module_call().assigned = True


class StateInput(EProperty):
    """The state a call starts from, which is None on a fresh prompt and can be given there nevertheless."""

    def __set__(self, obj: Any, value: Any) -> None:
        location = self._in_this_run(obj)
        raw = obj._inputs(self.name)
        if raw["state_input"] is not None:
            return super().__set__(obj, value)
        fresh = obj.fresh_state(raw["values"])
        if isinstance(fresh, str):
            raise ValueError(f"{self.name} of {obj.path} cannot be assigned here: {fresh}")
        self.check(obj, value, fresh)
        mediator, batcher = getcurrent().mediator(), obj.interleaver.batcher
        if batcher is not None and batcher.batching and mediator.batch_group is not None:
            start, size = mediator.batch_group  # the other invokes go on from nothing, which is a state of zeros
            rows = start, batcher.total - start - size
            before, after = (fresh.new_zeros(n, *fresh.shape[1:]) for n in rows)
            value = torch.cat([before, value, after])
        Mediator.swap(location, {**raw, "state_input": value})


class FinalState(EProperty):
    """The state a call leaves, which is None where no cache receives it."""

    def check(self, obj: Any, value: Any, replaced: Any) -> None:
        if replaced is None:
            raise ValueError(
                f"{self.name} of {obj.path} cannot be assigned here: this call keeps no cache (use_cache=False), so "
                f"nothing would receive it"
            )
        super().check(obj, value, replaced)


class StatesEProperty(EProperty):
    """The states after every token: served as they were, so an assignment would change nothing and raises."""

    def __set__(self, obj: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.name} of {obj.path} is read-only: write one token's state with set_state_after(token, value)"
        )


class RecurrentMixer(Standard):
    """A sequence mixer with a recurrent state, read at the kernel call its forward makes.

    A subclass says which kernels those are and what their arguments mean (`MECHANISM`); its values then mean the same
    in a prompt, a decode step and several tokens over a cache. Tokens are counted from the call's own first.

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
        raise NotImplementedError

    # -- values -----------------------------------------------------------------------------------------------------

    @EProperty(lambda mixer: mixer.CONTRIBUTION, "What the mixer adds to the residual stream", select=FIRST)
    def attention_output(self, value: Tensor) -> Residual:
        """What the mixer adds to the residual stream, ``[batch, seq, hidden_size]``. In-place edits and assignment
        reach the model.
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

    def _token(self, what: str, call: KernelCall, token: int) -> int:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"{what} of {self.path} takes a token's number, not {token!r}")
        if not -call.length <= token < call.length:
            raise IndexError(f"{what} of {self.path}: this call has tokens 0 to {call.length - 1}, no {token}")
        return token % call.length

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
        wanted = [self._token("states_at", call, token) for token in tokens]
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
        return self._read("state_after", call, self._token("state_after", call, token))

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Replace the state after ``token`` of this call: its own output and every later token go on from ``value``.

        The short convolution before the kernel still carries the tokens before, so what follows is not quite a fresh
        start. Raises ValueError for another shape, dtype or device, IndexError for a token the call does not have,
        Unavailable for the reason that `state` is.
        """
        self._need_states("set_state_after")
        call = self._entered("set_state_after")
        token = self._token("set_state_after", call, token)
        location = self._state_location("set_state_after", call, token)
        replaced = self._served_state("set_state_after", location, token)
        type(self).values()["state"].check(self, value, replaced)
        Mediator.swap(location, value)

    def _need_states(self, what: str) -> None:
        reason = type(self).state.reason(self)
        if reason is not None:
            raise Unavailable(f"{what} of {self.path} ({type(self._module).__name__}) is unavailable: {reason}")


def effective_attention(mixer: RecurrentMixer) -> EffectiveAttention:
    """How much each token's value contributes to each later token's head output, ``[batch, heads, query, key]``.

    Float32, zero where the query is before the key. Contracted with `attention_values` it is what the recurrence reads
    of this call's own tokens: `attention_head_outputs`, less what comes of `state_input` and of a skip connection.
    Computed when it is read, from the values as they are then.
    """
    raw = mixer._inputs("effective_attention")
    mixer.settle(raw)
    call = mixer._module_call()
    return call.mechanism.effective_attention(call, raw)
