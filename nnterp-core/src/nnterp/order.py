"""The forward order of the values, measured.

A value can only be read before the model runs past the place where it is served, so a script that reads several has to
know their order, which differs from family to family. One run tells: nnsight counts every location as it is served, so
the order in which locations enter that count is the forward's. A value stands where its location does. Where that is
known during the run alone (an operation inside a forward), or a value reads several (a derived one), a worker reads the
value and sees how far the run has come. The run is nnsight's ``scan``, which computes shapes and loads no weights; a
forward that branches on what its tensors hold is run for real.
"""

import difflib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from nnsight.intervention.interleaver import OutOfOrderError
from nnsight.intervention.source import SourceNotAvailable

from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import Unavailable
from nnterp.components.standard import Standard, hosts_of
from nnterp.probing import call, shapes_only, untouched

#: By block, or None for the root: the place of each available value, by name. A place is how many locations the run had
#: served before; None where it never came by.
Places = dict[int | None, dict[str, int | None]]


class Measured(NamedTuple):
    """What one probe found, and after how many calls of `invalidate`."""

    generation: int
    places: Places


_generation = 0
_measured: "WeakKeyDictionary[Any, Measured]" = WeakKeyDictionary()


def invalidate() -> None:
    """Have every model measured again when it is next asked: for whoever changes what a forward runs."""
    global _generation
    _generation += 1


def of(model: Any, layer: int | None = None) -> dict[str, int]:
    """The available values of block ``layer``, or of the root, in forward order: name to rank, from 0.

    Equal ranks are one location. A value whose module the measured run never called is left out.
    """
    places = {name: place for name, place in _places(model, layer).items() if place is not None}
    ranks = {place: rank for rank, place in enumerate(sorted(set(places.values())))}
    return {name: ranks[place] for name, place in sorted(places.items(), key=lambda item: item[1])}


def rank(model: Any, name: str, layer: int | None = None) -> tuple[int, int]:
    """``(side, rank)``: -1 before the blocks, their number after them, else the block's index; and the rank of `of`.

    Raises Unavailable where the checkpoint has no such value, KeyError where there is none of that name.
    """
    ranks = of(model, layer)
    if name not in ranks:
        raise _missing(model, name, layer)
    if layer is not None:
        return layer, ranks[name]
    place = _places(model, None)[name]
    blocks = (values.values() for index, values in _measured[model].places.items() if index is not None)
    before = all(place < other for values in blocks for other in values if other is not None)
    return (-1 if before else model.num_layers), ranks[name]


def _missing(model: Any, name: str, layer: int | None) -> Exception:
    """What to raise for a name that has no rank."""
    where = "the root" if layer is None else f"block {layer}"
    rows = Standard.support(model) if layer is None else model.support(layer)
    if name in rows:
        reason = rows[name] or "the run that measured the order never called its module"
        return Unavailable(f"{name} of {where} is unavailable: {reason}")
    if layer is None and name in model.support():
        return KeyError(f"{name!r} is a value of the blocks: say of which with layer=")
    if layer is not None and name in Standard.support(model):
        return KeyError(f"{name!r} is a value of the root: leave out layer=")
    close = difflib.get_close_matches(name, rows, n=3)
    return KeyError(
        f"{where} has no value {name!r}. {'Did you mean' if close else 'It has'} {', '.join(close or rows)}"
    )


# -- measuring --------------------------------------------------------------------------------------------------------


def _places(model: Any, layer: int | None) -> dict[str, int | None]:
    """What was measured of one block or the root; measured here where nothing was, or its values are others now."""
    found = _measured.get(model)
    if (
        found is None
        or found.generation != _generation
        or found.places[layer].keys() != _available(model, layer).keys()
    ):
        if model.interleaver.interleaving:
            raise ValueError(
                "the order of the values is measured by a run of its own, which cannot start inside another: call "
                "model.order() once before the trace"
            )
        found = _measured[model] = Measured(_generation, probe(model))
    return found.places[layer]


def _available(model: Any, layer: int | None) -> dict[str, tuple[Any, Any]]:
    """The available values of one block or the root by dotted name: ``(the envoy that hosts it, its descriptor)``."""
    host = model if layer is None else model.layers[layer]
    hosts = {"": host, **({} if layer is None else {f"{name}.": c for name, c in hosts_of(host).items()})}
    return {
        prefix + name: (envoy, value)
        for prefix, envoy in hosts.items()
        for name, value in envoy.values().items()
        if value.reason(envoy) is None
    }


def probe(model: Any) -> Places:
    """Measure where every available value falls, by one run of a few tokens.

    A scan, on a model whose weights are loaded or not; where a forward cannot run on shapes alone, a trace, which loads
    them. The model's forwards, edits and counts are as they were afterwards.
    """
    try:
        with shapes_only(model):
            return _run(model, model.scan)
    except RuntimeError:  # how torch refuses to say what a tensor without data holds
        model.dispatch()
        return _run(model, model.trace)


def _run(model: Any, start: Callable) -> Places:
    values = {layer: _available(model, layer) for layer in (None, *range(model.num_layers))}
    places: Places = {layer: dict.fromkeys(found) for layer, found in values.items()}
    known, in_the_run = [], []
    for layer, found in values.items():
        for name, (host, value) in found.items():
            wait = isinstance(value, DerivedEProperty) or value.inside_forward(host)
            (in_the_run if wait else known).append((places[layer], name, host, value))
    ids, further = call(model)
    with untouched(model) as counts, start() as tracer:
        with tracer.invoke(ids, **further):
            pass
        for found, name, host, value in in_the_run:
            with tracer.invoke():
                _read(found, name, host, value, counts)
    index = {location: place for place, location in enumerate(counts)}
    for found, name, host, value in known:
        found[name] = index.get(value._location(host))
    return places


def _read(found: dict[str, int | None], name: str, host: Any, value: Any, counts: dict[str, int]) -> None:
    """Read a value inside the run and note how far the run is then; one that it never comes by has no place."""
    with suppress(OutOfOrderError, SourceNotAvailable):
        value.__get__(host)
        found[name] = len(counts)
