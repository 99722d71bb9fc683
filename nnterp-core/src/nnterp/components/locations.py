"""Where a value is, written down: paths through the tree, and one element of what a location serves."""

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import torch
from greenlet import getcurrent
from nnsight import Envoy
from nnsight.intervention.source import STATE, SourceNotAvailable
from nnsight.intervention.util import first_input, replace_first_input

Select = int | str | tuple[int, str] | Callable[[Any], Any] | None

#: `EProperty.select`: the first element of a tuple or list, the value itself when it is neither.
FIRST = "first of a tuple"


@cache
def parsed(path: str) -> tuple[bool, int, tuple[str, ...], str]:
    """``(from the root, parents up, segments, served attribute)`` of a path."""
    rest = path.removeprefix("/")
    ups = 0
    while rest.startswith("../"):
        rest, ups = rest[3:], ups + 1
    *segments, attribute = rest.split(".")
    return path.startswith("/"), ups, tuple(segments), attribute


def child(host: Any, name: str) -> Envoy | None:
    """The child envoy ``name`` (standard or native) of ``host``, or None when its module has no such child."""
    found = host.__dict__.get(name)
    if isinstance(found, Envoy):
        return found
    return getattr(host, name, None) if isinstance(getattr(host._module, name, None), torch.nn.Module) else None


def pick(raw: Any, attribute: str, select: Any) -> Any:
    """The element ``select`` of ``raw``, which a location serves under ``attribute``; LookupError where it is not
    there.

    An input is served as ``(args, kwargs)``; ``input`` without a selection is the first argument.
    """
    if attribute not in ("input", "inputs"):
        if whole(raw, select):
            return raw
        by_name = isinstance(select, str) and select is not FIRST
        if isinstance(raw, torch.Tensor) or (by_name and isinstance(raw, (tuple, list))):
            raise LookupError(f"it returned a {type(raw).__name__}, and the value is its element {select!r}")
        return raw[0 if select is FIRST else select]
    args, kwargs = raw
    if select is None:
        return first_input(args, kwargs) if attribute == "input" else raw
    index, keyword = select if isinstance(select, tuple) else (select, select)
    if isinstance(index, int) and index < len(args):
        return args[index]
    if keyword in kwargs:
        return kwargs[keyword]
    raise LookupError(
        f"it passed {len(args)} positional arguments and {', '.join(map(repr, kwargs)) or 'no keywords'}, and the "
        f"value is the argument {select!r}"
    )


def pack(raw: Any, attribute: str, select: Any, value: Any) -> Any:
    """``raw`` with ``value`` in the place of the element that `pick` gives; everything else is kept."""
    if attribute not in ("input", "inputs"):
        if whole(raw, select):
            return value
        select = 0 if select is FIRST else select
        if isinstance(raw, (tuple, list)):
            elements = list(raw)
            elements[select] = value
            return type(raw)(*elements) if hasattr(raw, "_fields") else type(raw)(elements)
        packed = copy(raw)
        packed[select] = value
        return packed
    args, kwargs = raw
    if select is None:
        return replace_first_input(args, kwargs, value) if attribute == "input" else value
    index, keyword = select if isinstance(select, tuple) else (select, select)
    if isinstance(index, int) and index < len(args):
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, keyword: value}


def whole(raw: Any, select: Any) -> bool:
    """Whether the value is all of an output: nothing is selected, or `FIRST` of what is no tuple."""
    return select is None or (select is FIRST and not isinstance(raw, (tuple, list)))


def refuse_late(what: str, kind: str, host: Any) -> None:
    """Refuse the first use of a forward's operations after that forward has begun to run.

    Operations are counted from when they are first asked for, so a read that starts at a later call would be answered
    with another call's value.
    """
    interleaver = host.interleaver if isinstance(host, Envoy) else host.envoy.interleaver
    if isinstance(host, Envoy):
        state = host._module.__dict__.get(STATE)
        ready = state is not None and state.sourced
    else:
        ready = interleaver.sourced.get(host.path) is not None
    mediator = getattr(getcurrent(), "mediator", None)
    if not ready and mediator is not None and mediator().occurrence(f"{host.path}.input"):
        raise SourceNotAvailable(
            f"{what} is served by the operations inside {host.path}, which has already been called in this run: ask "
            f"for them from the first call on, or set `sourced = True` on {kind} to have them there from the start"
        )


# -- what may be asked of a run ---------------------------------------------------------------------------------------


def refuse_other_model(what: str, obj: Any, running: Any) -> None:
    """Refuse a value of ``obj`` in the run that ``running`` drives, where that run is not of the module ``obj`` wraps.

    Locations are paths, and two models of one family have the same: the other's value would be the answer.
    """
    if not running.envoys:
        raise ValueError(
            f"{what} is no gradient, and a backward block has those alone: read it before, its .grad there"
        )
    found = running.envoys.get(id(obj._module))
    if found is None or found.path != obj.path:
        raise ValueError(
            f"{what} belongs to another model than the one that this trace runs: trace the model it is a value of"
        )


def refuse_mixed_rows(described: Any, obj: Any, value: Any) -> None:
    """Refuse a value whose rows are not those of the invoke that asks: a run with more rows than its invokes gave it.

    nnsight then serves every invoke all rows, and an edit would reach the others'.
    """
    batcher, group = obj.interleaver.batcher, getcurrent().mediator().batch_group
    if batcher is None or not batcher.batching or group is None or "batch" not in (described.dims or ())[:1]:
        return
    if isinstance(value, torch.Tensor) and value.shape[0] != group[1]:
        raise ValueError(
            f"{described.name} of {obj.path} has {value.shape[0]} rows in this run (beams, or several sequences for a "
            f"prompt) and its invokes gave it {batcher.total}, so an invoke's own cannot be told: trace the invokes on "
            f"their own"
        )


def missed(what: str, location: str, absent: str = "") -> str:
    """What to say of a value that the run, now at its end, did not come by after it was asked for.

    ``absent`` says why a run may have none of it at all.
    """
    if getcurrent().mediator().occurrence(location):
        return (
            f"{what} was asked for when the model had run past it: ask in the order of the forward, which "
            f"model.order() and model.rank() tell, or in an invoke of its own"
        )
    if absent:
        return f"{what} was not served in this run. {absent}"
    return (
        f"{what} was not served in this run, which never came to {location!r}: nothing inside a module that is skipped "
        f"or not called is served"
    )
