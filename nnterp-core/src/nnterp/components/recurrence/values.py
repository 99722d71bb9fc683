"""The kinds of values at a mixer's kernel call: what it computes from, the states it starts from, holds and leaves."""

from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator
from torch import Tensor

from nnterp.components.eproperty import EProperty
from nnterp.components.recurrence.calls import INPUTS


def at_kernel(name: str) -> Any:
    """The key of a value that is served at ``name`` by the kernel call of its mixer."""
    return lambda mixer: f"{mixer.KERNEL_HOST}{name}"


def served_at(name: str, description: str, kind: type[EProperty] = EProperty, select: str | None = None) -> EProperty:
    """A value that the kernel call serves at ``name``."""
    return kind(at_kernel(name), description, unavailable=lambda mixer: mixer.no_kernel(), select=select)


def entering(value: str, description: str, kind: type[EProperty] = EProperty) -> EProperty:
    """A value that the kernel computes from, the one it calls ``value``."""
    return served_at(INPUTS, description, kind, value)


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
