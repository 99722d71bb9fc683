"""What a recurrent mixer of the bare model computes: its kernels replaced, and its recurrence written out.

A mixer hands everything to one function of its modeling file, a kernel for prompts or one for decode steps. While
`AtKernels` stands in for a block, those names are bound to a function that records what the kernel is given and returns
(and puts edits there), then calls transformers' own; or, with ``written_out``, runs the recurrence token by token in
float64 in its place. `Recurrence` says what a kernel's arguments mean; one subclass for each kind of recurrence.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nnterp.testing.oracles import Block

Values = dict[str, Any]
At = Callable[[str, Tensor], Tensor]

QUERIES, KEYS, VALUES = "attention_queries", "attention_keys", "attention_values"
DECAYS, BETAS = "decays", "betas"
#: What the kernel computes from, all of it served together.
ENTERING = (QUERIES, KEYS, VALUES, BETAS, DECAYS)


def nothing(part: str, tensor: Tensor) -> Tensor:
    """An ``at`` that neither records nor edits."""
    return tensor


class Kernel:
    """One call of a kernel: its arguments by name, and whether it is a decode step's."""

    def __init__(self, function: Callable, step: bool, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(function).bind(*args, **kwargs)
        self.function, self.step, self.arguments = function, step, dict(bound.arguments)
        self.arguments.update(self.arguments.pop("kwargs", {}))

    def __call__(self, **replaced: Any) -> Any:
        return self.function(**{**self.arguments, **replaced})


class Recurrence:
    """One kind of recurrence: what its kernels' arguments mean, and the recurrence itself.

    Attributes:
        COMPONENT: The class of `nnterp.components` that serves it; the family's own has the same name.
        PROMPT, STEP: The names of its two kernels in the modeling file.
        READ_ONLY: Values that cannot be assigned.
        UNAVAILABLE: Part of the reason by value, for what its mixers do not serve as they are loaded.
        STATES_WRITABLE: Whether the state after a token can be written where `states` is served.
        FROM_A_STATE: Whether a fresh prompt can start from a state.
        FRESH: Part of the reason why it cannot.
        CONTINUES: Whether several tokens over a cache start from its state.
        REFUSES_IN_PLACE: Values that are views of one ``split``, which torch refuses to edit in place under autograd.
        BESIDE: Values that the kernel is not given, but one that they are a function of.
    """

    COMPONENT = ""
    PROMPT, STEP = "", ""
    READ_ONLY: tuple[str, ...] = ()
    UNAVAILABLE: dict[str, str] = {}
    STATES_WRITABLE = True
    FROM_A_STATE = True
    FRESH = ""
    CONTINUES = True
    REFUSES_IN_PLACE: tuple[str, ...] = (QUERIES, KEYS, VALUES)
    BESIDE: tuple[str, ...] = ()

    # -- the kernels --------------------------------------------------------------------------------------------------

    def modeling(self, block: nn.Module) -> ModuleType:
        """The file in which a block's mixer looks its kernels up."""
        return sys.modules[type(block).__module__]

    @contextmanager
    def replaced(self, block: nn.Module, serve: Callable[[Kernel], Any]) -> Iterator[None]:
        """The kernels of ``block`` are ``serve``, which is handed each call."""
        file = self.modeling(block)
        plain = {name: getattr(file, name) for name in (self.PROMPT, self.STEP)}

        def replacement(name: str) -> Callable:
            return lambda *args, **kwargs: serve(Kernel(plain[name], name == self.STEP != self.PROMPT, args, kwargs))

        for name in plain:
            setattr(file, name, replacement(name))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(file, name, function)

    def serve(self, at: At, kernel: Kernel, written_out: bool = False) -> Any:
        """``kernel`` with every value handed to ``at``; the recurrence in float64 in its place if ``written_out``."""
        values, changed = self.entering(kernel), set()
        for name in [name for name in ENTERING if name in values]:
            value, values[name] = values[name], at(name, values[name])
            if values[name] is not value:
                changed.add(name)
                values.update(self.implied(kernel, name, values[name]))
        self.put(kernel, values, changed)
        initial = self.initial(kernel)
        if initial is not None:
            initial = at("state_input", initial)
        if written_out:
            after = {**self.entering(kernel), "initial": initial}
            states, outputs = self.run(after, self.extras(kernel), at)
            final = states[:, -1].float()
            outputs = outputs.to(after[VALUES].dtype)
        else:
            outputs, final = self.called(kernel, initial)
        outputs = at("attention_head_outputs", outputs)
        if final is not None:
            final = at("state_output", final)
        return self.returned(kernel, outputs, final)

    def entering(self, kernel: Kernel) -> Values:
        """The values by name, tokens first."""
        raise NotImplementedError

    def implied(self, kernel: Kernel, name: str, value: Tensor) -> Values:
        """The values that are others where ``name`` is edited to ``value``."""
        return {}

    def put(self, kernel: Kernel, values: Values, changed: set[str]) -> None:
        """Have ``kernel`` compute from ``values``, of which those in ``changed`` are not the model's own."""
        raise NotImplementedError

    def initial(self, kernel: Kernel) -> Tensor | None:
        """A copy of the state that ``kernel`` starts from, key side first."""
        raise NotImplementedError

    def called(self, kernel: Kernel, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``(head outputs, final state)`` of the kernel, started from ``initial``; tokens first, key side first."""
        raise NotImplementedError

    def returned(self, kernel: Kernel, outputs: Tensor, final: Tensor | None) -> Any:
        """What the kernel returns for these; and what it does to the cache."""
        raise NotImplementedError

    def cached(self, state: Tensor) -> Tensor:
        """A state of transformers' cache, key side first."""
        return state

    # -- the recurrence -----------------------------------------------------------------------------------------------

    def extras(self, kernel: Kernel) -> Values:
        """What a call's recurrence needs beside the values (a skip's weight); `parameters` has it of the mixer."""
        return {}

    def parameters(self, mixer: nn.Module) -> Values:
        """The same as `extras`, of the bare mixer."""
        return {}

    def run(self, values: Values, extras: Values, at: At = nothing) -> tuple[Tensor, Tensor]:
        """``(states, outputs)`` of the recurrence in float64, ``[batch, seq, ...]`` each.

        From ``values["initial"]``, zeros where it is None. ``at("state", state)`` is handed the state after each token,
        float32, and what it returns goes on.
        """
        values = {name: value if value is None else value.double() for name, value in values.items()}
        values = self.prepared(values)
        state = values["initial"] if values.get("initial") is not None else self.zeros(values)
        states, outputs = [], []
        for token in range(values[VALUES].shape[1]):
            now = {name: value[:, token] for name, value in values.items() if name != "initial"}
            state = self.next_state(state, now)
            rounded = state.float()
            written = at("state", rounded)
            state = state if written is rounded else written.double()
            states.append(state)
            outputs.append(self.read(state, now, extras))
        return torch.stack(states, dim=1), torch.stack(outputs, dim=1)

    def prepared(self, values: Values) -> Values:
        """The values as the recurrence multiplies them (normed, repeated for their heads)."""
        return values

    def zeros(self, values: Values) -> Tensor:
        """The state before a fresh prompt's first token."""
        raise NotImplementedError

    def next_state(self, state: Tensor, now: Values) -> Tensor:
        """The state after one token, of ``state`` and that token's values."""
        raise NotImplementedError

    def read(self, state: Tensor, now: Values, extras: Values) -> Tensor:
        """The token's head output: what its query reads, and what skips the recurrence."""
        raise NotImplementedError

    def weights(self, values: Values) -> Tensor:
        """Effective attention in float64, ``[batch, heads, query, key]``: what a one in each token's value comes to."""
        length = values[VALUES].shape[1]
        columns = []
        for token in range(length):
            impulse = torch.zeros_like(values[VALUES])
            impulse[:, token] = 1
            _, outputs = self.run({**values, VALUES: impulse, "initial": None}, {})
            columns.append(outputs if outputs.dim() == 3 else outputs[..., 0])
        return torch.stack(columns, dim=-1).transpose(1, 2)


class AtKernels(Block):
    """A block that runs as it is, with the kernels of its mixer replaced (`Recurrence.serve`)."""

    def __init__(self, recurrence: Recurrence, written_out: bool = False) -> None:
        self.recurrence, self.written_out = recurrence, written_out

    def __call__(self, at: Callable, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def serve(kernel: Kernel) -> Any:
            return self.recurrence.serve(at, kernel, self.written_out)

        with self.recurrence.replaced(block, serve):
            return type(block).forward(block, *args, **kwargs)
