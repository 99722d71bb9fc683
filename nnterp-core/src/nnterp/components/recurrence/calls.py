"""Serving the inside of a recurrent mixer at the call of its kernel.

A mixer's forward projects, convolves, and hands everything the recurrence needs to one function: a chunked kernel for a
prompt, a single update for a decode step. In a copy of the forward that call goes through `KernelCall`, which serves
the run, in this order, under the mixer's path:

* ``kernel_inputs``: what the recurrence is computed from, by name, tokens first (`Mechanism.read`);
* ``state``: the state after each token, one visit per token, where the kernel is a loop over tokens; and the state
  after a token that somebody asks for (`token_location`), under any kernel;
* ``states``: all of them, where the kernel holds them;
* ``head_outputs``: what the queries read from the state;
* ``state_output``: the state after the call's last token, as the cache receives it.

Both kernels are served by the same names in the same layout, so a value is one thing in a prompt and in a decode step.
A call that nobody reads runs the kernel as it stands. What is handed on after a read is the very argument the model
made wherever nothing was changed, so a read moves no number, except where a kernel is run in pieces to reach a token's
state, which rounds differently.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from nnsight.intervention.source import STATE
from torch import Tensor

from nnterp.components.definitions import CannotTap, calls
from nnterp.components.recurrence.mechanisms import MECHANISMS, Mechanism
from nnterp.components.recurrence.sources import PER_TOKEN, compiled, plain, serving_copy
from nnterp.components.taps import HELPERS, Rule

INPUTS = "kernel_inputs"
STATE_AT = "state"
STATES = "states"
OUTPUTS = "head_outputs"
FINAL = "state_output"

NAME = "__kernel__"

#: The attribute of a module that holds its `KernelCall` while one is under way.
UNDER_WAY = "__nnterp_kernel_call__"


def kernel_call(mechanism: str, prompt: str, step: str) -> Rule:
    """The calls of the kernels ``prompt`` and ``step``, whose arguments and results mean what ``mechanism`` says."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        found = [(kernel, call) for kernel in dict.fromkeys((prompt, step)) for call in calls(definition, kernel)]
        if not found:
            raise CannotTap(f"{definition.name} calls neither {prompt} nor {step}")
        for kernel, call in found:
            module = ast.Name(id=definition.args.args[0].arg, ctx=ast.Load())
            facts = [ast.Constant(mechanism), ast.Constant(kernel == step and step != prompt)]
            call.args[:0] = [ast.copy_location(node, call) for node in (module, *facts)] + [call.func]
            call.func = ast.copy_location(ast.Name(id=NAME, ctx=ast.Load()), call)

    return apply


def run_kernel(module: Any, mechanism: str, step: bool, kernel: Callable, *args: Any, **kwargs: Any) -> Any:
    """``kernel(*args, **kwargs)``, serving the run that ``module`` takes part in."""
    state = module.__dict__.get(STATE)
    interleaver, path, _ = state.active() if state is not None else (None, None, ())
    if interleaver is None:
        return kernel(*args, **kwargs)
    call = KernelCall(module, interleaver, path, MECHANISMS[mechanism], step, kernel, args, kwargs)
    if call.unread():
        return kernel(*args, **kwargs)
    module.__dict__[UNDER_WAY] = call
    try:
        return call.run()
    finally:
        del module.__dict__[UNDER_WAY]


HELPERS[NAME] = run_kernel


def token_location(path: str, token: int) -> str:
    """Where the state after ``token`` alone is served by the mixer at ``path``."""
    return f"{path}.{STATE_AT}_after_{token}"


def parameters(kernel: Callable) -> tuple[str, ...]:
    """The names of a kernel's parameters, in order."""
    names = declared(plain(kernel))
    return names[1:] if inspect.ismethod(kernel) else names


@cache
def declared(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def laid_out_as(given: Any, value: Any) -> Any:
    """``value``, with the strides of ``given`` in whose place it is: how a kernel rounds depends on them.

    So a row that nobody edited, which nnsight puts together with the edited ones, computes what it computes alone.
    """
    both = isinstance(given, Tensor) and isinstance(value, Tensor)
    if not both or value.stride() == given.stride() or value.shape != given.shape or 0 in given.stride():
        return value
    return torch.empty_strided(given.shape, given.stride(), dtype=value.dtype, device=value.device).copy_(value)


class KernelCall:
    """One call of a kernel by a mixer in a run.

    Attributes:
        step: Whether it is the single update of a decode step.
        arguments: The kernel's arguments by name, as they are going to be passed.
        length: How many tokens the call has.
        position: How many of them the recurrence is past.
        kept: The states it has come past, where somebody wants them all.
        number: How many calls this mixer's kernels had before.
        assigned: Whether a value that is one quantity with another was assigned; ``edited``: or edited in any way.
        settled: The values as they were when the two last agreed (`Mechanism.settle`).
    """

    def __init__(
        self,
        module: Any,
        interleaver: Any,
        path: str,
        mechanism: Mechanism,
        step: bool,
        kernel: Callable,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        self.module, self.interleaver, self.path = module, interleaver, path
        self.mechanism, self.step, self.kernel = mechanism, step, kernel
        names = parameters(kernel)
        self.positional = names[: len(args)]
        self.arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self.length = 1 if step else mechanism.length(self.arguments)
        self.position = 0
        self.kept: list[Tensor] | None = None
        self.settled: dict[str, Any] | None = None
        self.assigned = self.edited = False
        self.number = interleaver.counts.get(f"{path}.{INPUTS}", 0)

    def location(self, name: str) -> str:
        return f"{self.path}.{name}"

    def index(self, mediator: Any) -> int:
        """How many calls this mixer's kernels had before, since the worker of ``mediator`` started."""
        return self.number - mediator.counts_at_start.get(self.location(INPUTS), 0)

    def handle(self, name: str, value: Any) -> Any:
        return self.interleaver.handle(self.location(name), value)

    @property
    def loops(self) -> bool:
        """Whether the kernel is transformers' own loop over tokens, whose states can be served."""
        if compiled(self.kernel) is not None or plain(self.kernel).__name__ not in PER_TOKEN:
            return False
        return self.mechanism.loops(self)

    def unread(self) -> bool:
        """Whether nobody has a use for the inside of this call, which then is a visit of each of its locations.

        A worker runs only where what it waits for is handed out; while none waits for something of this mixer, none can
        begin to during the call.
        """
        if self.interleaver.observers or any(waits.startswith(self.path) for waits in self.interleaver.parked):
            return False
        counts = self.interleaver.counts
        for name in (INPUTS, STATES, OUTPUTS, FINAL):
            counts[self.location(name)] = counts.get(self.location(name), 0) + 1
        if self.loops:
            counts[self.location(STATE_AT)] = counts.get(self.location(STATE_AT), 0) + self.length
        return True

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        given = self.mechanism.read(self)
        versions = {name: value._version for name, value in given.items() if isinstance(value, Tensor)}
        served = self.handle(INPUTS, given)
        changed = {
            name: laid_out_as(given[name], value)
            for name, value in served.items()
            if value is not given[name] or (isinstance(value, Tensor) and value._version != versions[name])
        }
        self.mechanism.write(self, changed, served)
        if torch.is_grad_enabled():
            self.mechanism.differentiate(self, {n: v for n, v in served.items() if n not in changed}, served)
        self.outputs_served = self.states_served = False
        if self.loops:
            if self._wanted(STATE_AT, STATES) or self._asked():
                self.kept = []
            result = serving_copy(self.kernel)(self, **self.arguments)
        elif self._asked() and not self.step:
            result = self._in_pieces()
        else:
            result = self._whole()
        outputs, final = self.mechanism.unpack(self, result)
        if not self.states_served:
            self._serve_states(final)
        if not self.outputs_served:
            outputs = self.outputs(outputs)
        final = self._final(final)
        return self.mechanism.pack(self, outputs, final)

    def _whole(self) -> Any:
        """The kernel in one piece; a copy of transformers' own where that has something to serve within."""
        copy = None if compiled(self.kernel) is not None else serving_copy(self.kernel)
        if copy is not None:
            return copy(self, **self.arguments)
        gate = self.mechanism.gate(self)
        result = self.kernel(*self._args(), **self._kwargs())
        if gate is None:
            return result
        outputs, final = self.mechanism.unpack(self, result)
        return self.mechanism.pack(self, self.outputs(outputs) * torch.nn.functional.silu(gate), final)

    def _args(self) -> tuple:
        return tuple(self.arguments[name] for name in self.positional)

    def _kwargs(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.positional}

    def _in_pieces(self) -> Any:
        """The kernel from one token that somebody asks for to the next, each piece from the state of the last."""
        outputs, state = [], self.mechanism.initial(self)
        while self.position < self.length:
            stop = min((t for t in self._asked() if t >= self.position), default=self.length - 1) + 1
            arguments = self.mechanism.piece(self, self.position, stop, state)
            args = tuple(arguments.pop(name) for name in self.positional)
            part, state = self.mechanism.unpack(self, self.kernel(*args, **arguments), final=True)
            outputs.append(part)
            state = self._chosen(stop - 1, state)
            self.position = stop
        return self.mechanism.pack(self, torch.cat(outputs, dim=1), state)

    # -- what a copy of a kernel calls --------------------------------------------------------------------------------

    def token(self, state: Tensor) -> Tensor:
        """``state``, the recurrence's after the next token, as it goes on."""
        state = self._chosen(self.position, self.handle(STATE_AT, state))
        self.position += 1
        if self.kept is not None:
            self.kept.append(state)
        return state

    def boundaries(self, states: Tensor) -> Tensor:
        """Note ``states``, those at the boundaries of chunks, the first before the first chunk."""
        if states.shape[1] == self.length + 1:
            self.states_served = True
            self.handle(STATES, self.mechanism.served_state(states[:, 1:]).clone())
        return states

    def outputs(self, outputs: Tensor) -> Tensor:
        """``outputs``, what was read from the state, as they go on."""
        if not self.states_served and self.loops:
            self._serve_states(None)
        self.outputs_served = True
        return self.mechanism.unserved_outputs(self, self.handle(OUTPUTS, self.mechanism.served_outputs(self, outputs)))

    # -- states -------------------------------------------------------------------------------------------------------

    def _wanted(self, *names: str) -> bool:
        return any(self.location(name) in self.interleaver.parked for name in names) or bool(self.interleaver.observers)

    def _asked(self) -> list[int]:
        """The tokens that somebody waits for the state after."""
        start = token_location(self.path, 0)[:-1]
        return [int(waits[len(start) :]) for waits in self.interleaver.parked if waits.startswith(start)]

    def _chosen(self, token: int, state: Tensor) -> Tensor:
        """``state``, that after ``token``, as who asked for it leaves it."""
        location = token_location(self.path, token)
        if location not in self.interleaver.parked:
            return state
        for mediator in self.interleaver.mediators:
            if mediator.pending is not None and mediator.pending.provider == location:
                align(mediator, location, self)
        served = self.interleaver.handle(location, self.mechanism.served_state(state))
        return self.mechanism.unserved_state(served)

    def _serve_states(self, final: Tensor | None) -> None:
        self.states_served = True
        if self.kept:
            self.handle(STATES, torch.stack(self.kept, dim=1))
        elif self.step and final is not None:
            self._chosen(0, final)
            self.handle(STATES, self.mechanism.served_state(final).unsqueeze(1).clone())
        else:
            self.interleaver.counts[self.location(STATES)] = self.interleaver.counts.get(self.location(STATES), 0) + 1

    def _final(self, final: Tensor | None) -> Tensor | None:
        """The state the cache receives: a tensor of its own, which the next step may overwrite."""
        if final is None:
            self.handle(FINAL, None)
            return None
        served = self.mechanism.served_state(final).clone()
        left = self.handle(FINAL, served)
        return self.mechanism.keep(self, final, left, left is not served or left._version != 0)


def align(mediator: Any, location: str, call: KernelCall) -> None:
    """Have nnsight count ``location``, which most calls do not serve, as often as the kernel was called.

    What a worker waits for is a location and the number of the call, counted since the worker started.
    """
    call.interleaver.counts[location] = mediator.counts_at_start.get(location, 0) + call.index(mediator)
