"""Standard values: descriptors whose location is a path from the envoy that hosts them.

nnsight's `eproperty` serves one location of its host. A standard value sits somewhere near its host: the module's own
output, a sibling norm's, an argument of a call inside the forward. `EProperty` says where with a path, can say why a
value is not there (`Unavailable`), and checks an assignment against what it replaces at the line that makes it.
"""

import sys
import typing
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent
from nnsight import Envoy
from nnsight.intervention.eproperty import WriteBack, eproperty
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from nnsight.intervention.source import SourceNotAvailable

from nnterp.components.gradients import ROWS_OF_A_BATCH, gradient_in_base
from nnterp.components.layouts import axes, name_of
from nnterp.components.locations import (
    FIRST,
    Select,
    child,
    missed,
    pack,
    parsed,
    pick,
    refuse_late,
    refuse_mixed_rows,
    refuse_other_model,
)

Reason = str | Callable[[Any], str | None] | None


class Unavailable(RuntimeError):
    """A standard value this checkpoint does not have, and why.

    Raised on access, before the model runs, at the line that asks. ``support()`` of a model or an envoy reports the
    same reasons without raising.
    """


class EProperty(eproperty):
    """A standard value: a location given as a path, with a layout, that can be unavailable.

    Args:
        key: Where the value lives, relative to the host: dotted segments that end in the served attribute
            (``"output"``, ``"o_proj.input"``). A leading ``/`` starts at the model's root, each leading ``../`` at the
            parent. A segment is a child module, by its standard or native name; ``source`` enters the forward that the
            path has reached, and the segment after it is one of nnsight's operation labels. A function of the envoy
            that returns such a path is called on every access. Default: the value's own name.
        description: One line for the repr of the model.
        unavailable: Why the value does not exist, or a function of the envoy that returns why, or None where it does.
        select: One element of what the location serves: a positional index or keyword of ``inputs`` (or both, as
            ``(index, keyword)``, for an argument that may be passed either way), a tuple index or key of an output,
            `FIRST`, or a function of the envoy that returns one of these. A write puts that element back and keeps the
            others.
        resizable: Axes an assignment may change the size of.

    Decorating a function makes it the read view, ``preprocess(envoy, element)``; its return annotation is the layout. A
    view that shares memory needs nothing else for in-place edits; ``.postprocess`` maps an assigned value back to the
    element, and ``.transform`` does so for a read that had to copy.

    Reads and writes raise `Unavailable` with the reason, ValueError outside a trace, and nnsight's
    ``SourceNotAvailable`` where an operation is not in the forward. An assignment that differs in rank, shape, dtype or
    device from what it replaces raises ValueError, one that is no tensor raises TypeError; nothing is broadcast or
    cast.
    """

    #: What to say where a run ends without having come by the value, before what holds of any.
    absent: str = ""

    def __init__(
        self,
        key: str | Callable[[Any], str] | None = None,
        description: str | None = None,
        unavailable: Reason = None,
        select: Select | Callable = None,
        resizable: tuple[str, ...] = (),
    ) -> None:
        eproperty.__init__(self, None, description)
        self.key = key
        self.select = select
        self.resizable = resizable
        self._unavailable = unavailable
        self._layout: Any = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.declared_in = name, owner.__module__
        if self.key is None:
            self.key = name

    def __reduce__(self) -> tuple:
        # A property pickles as one, without its attributes; a class shipped by value needs them.
        return _rebuild, (type(self), dict(self.__dict__))

    def at(
        self, key: str | Callable[[Any], str] = ..., select: Any = ..., unavailable: Any = ..., layout: Any = ...
    ) -> "EProperty":
        """The same value at another place or in another layout: a copy that differs in what is given, docs included."""
        moved = copy(self)
        given = {"key": key, "select": select, "_unavailable": unavailable, "_layout": layout}
        vars(moved).update({name: value for name, value in given.items() if value is not ...})
        if layout is not ... and self.__doc__ and self.layout is not None:
            moved.__doc__ = self.__doc__.replace(axes(self.layout), axes(layout))
        return moved

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def _annotated(self) -> Callable | None:
        return self._preprocess

    @property
    def layout(self) -> Any:
        """The value's axes as a jaxtyping type (``Residual``, ``Pattern``, …), or None where it has none.

        Read off the return annotation of the function that defines the value. ``isinstance(tensor, layout)`` checks
        rank and dtype; `dims` names the axes.
        """
        if self._layout is None and self._annotated is not None:
            hint = typing.get_type_hints(self._annotated).get("return")
            options = [hint, *typing.get_args(hint)]
            self._layout = next((option for option in options if hasattr(option, "dim_str")), False)
        return self._layout or None

    @property
    def dims(self) -> tuple[str, ...] | None:
        """The axis names of `layout`, in order: ``("batch", "seq", "hidden_size")``; None without one."""
        return tuple(self.layout.dim_str.split()) if self.layout is not None else None

    @property
    def layout_name(self) -> str | None:
        """The name the layout has where the value is declared, or else where it is defined (``"Residual"``)."""
        if self.layout is None:
            return None
        declared = vars(sys.modules[self.declared_in]) if self.declared_in in sys.modules else {}
        return name_of(self.layout, declared) or name_of(self.layout, self._annotated.__globals__)

    def __str__(self) -> str:
        reason = f"Unavailable: {self._unavailable}" if isinstance(self._unavailable, str) else self.description
        layout = f" -> {self.layout_name or 'Tensor'} {axes(self.layout)}" if self.layout is not None else ""
        return f"({self.name}){layout}: {reason}"

    # -- where it is ------------------------------------------------------------------------------------------------

    def path(self, obj: Any) -> str:
        """The path of this value on ``obj``."""
        return self.key(obj) if callable(self.key) else self.key

    def inside_forward(self, obj: Any = None) -> bool:
        """Whether the value is an operation reached through ``source``; without ``obj`` a key function is one too."""
        return (obj is None and callable(self.key)) or "source" in parsed(self.path(obj))[2]

    @staticmethod
    def attribute(path: str) -> str:
        """The served attribute a path ends in: ``output``, ``input``, ``inputs``, or a location of the host's own."""
        return parsed(path)[3]

    def reason(self, obj: Any) -> str | None:
        """Why this value is not available on ``obj``, or None when it is."""
        return self._find(obj, enter=False)[0]

    def _find(self, obj: Any, enter: bool) -> tuple[str | None, str]:
        """``(reason, location)``: why there is no such value on ``obj``, or the location that serves it.

        With ``enter``, the operations on the way are put in place; without, the path is followed as far as to the
        module whose forward they are in.
        """
        reason = self._unavailable(obj) if callable(self._unavailable) else self._unavailable
        reason = reason or getattr(obj, "refused", {}).get(self.name)
        if reason is not None or self.key is None:
            return reason, ""
        path = self.key if isinstance(self.key, str) else self.path(obj)
        from_root, ups, segments, attribute = parsed(path)
        host = obj.root if from_root else obj
        for _ in range(ups):
            host = host.parent
            if host is None:
                return f"its path {path!r} leads above the model", ""
        for index, segment in enumerate(segments):
            if segment == "source":
                host = self._operation(obj, host, segments[index:]) if enter else host
                break
            found = child(host, segment)
            if found is None:
                return f"no {segment} module on this {role(host)}", ""
            host = found
        if attribute in getattr(type(host), "TAPS", ()):
            reason = host.tap_reason(attribute)
        return reason, f"{host.path}.{'input' if attribute == 'inputs' else attribute}"

    def _operation(self, obj: Any, host: Any, path: tuple[str, ...]) -> Any:
        """The operation at ``path`` from ``host``, with the operations on the way put in place."""
        for operation in path:
            if operation == "source":
                refuse_late(f"{self.name} of {obj.path}", type(obj).__name__, host)
                host = host.source
            elif operation in host.names:
                host = host.node(operation)
            else:
                raise SourceNotAvailable(
                    f"{self.name} of {obj.path} is read at {self.path(obj)!r}, and there is no operation {operation!r} "
                    f"in that forward; there are: {', '.join(host.names)}"
                )
        return host

    def _location(self, obj: Any) -> str:
        return self._find(obj, enter=True)[1]

    def _in_this_run(self, obj: Any) -> str:
        """The location to ask the run for; raises where there is no such value on ``obj``, or no run."""
        mediator = getattr(getcurrent(), "mediator", None)
        running = mediator is not None
        if running and (run := mediator().interleaver) is not obj.interleaver:
            refuse_other_model(f"{self.name} of {obj.path}", obj, run)
        reason, location = self._find(obj, enter=running)
        if reason is not None:
            raise Unavailable(f"{self.name} of {obj.path} ({type(obj._module).__name__}) is unavailable: {reason}")
        if not running:
            raise ValueError(
                f"{self.name} of {obj.path} exists only while the model runs: read or assign it inside a "
                f"`with model.trace(...):` block that is given a prompt, and .save() it there to keep it"
            )
        return location

    # -- reading ----------------------------------------------------------------------------------------------------

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        try:
            location = self._in_this_run(obj)
            if self._transform is not None:
                mediator = Mediator.current(location)
                occurrence = mediator.wanted(location)
                waiting = mediator.transform
                if waiting is not None and waiting.key == (self, location, occurrence):
                    return waiting.view
            raw = self._served(obj, location)
            alone = self.select in (None, FIRST) and isinstance(raw, torch.Tensor)
            element = raw if alone else self._pick(obj, raw)
            value = self._view(obj, element)
            if obj.interleaver.batcher is not None:
                self._check_rows(obj, value)
            if value is not element or hasattr(element, ROWS_OF_A_BATCH):
                gradient_in_base(value)
            if self._transform is not None:
                back = partial(self._write_back, obj, value, raw)
                mediator.transform = WriteBack(back, value, self, location, occurrence)
            return value
        except AttributeError as error:
            # A property's AttributeError turns into "no such attribute" on the way out, which hides where it came from.
            raise RuntimeError(f"reading {self.name} of {obj.path} failed: {error}") from error

    def _served(self, obj: Any, location: str) -> Any:
        try:
            return Mediator.value(location)
        except OutOfOrderError as error:  # the same one, by which nnsight knows the end of a loop over steps
            absent = self.absent or getattr(obj, "ABSENT", "")
            error.args = (missed(f"{self.name} of {obj.path}", location, absent),)
            raise

    def _view(self, obj: Any, element: Any) -> Any:
        return element if self._preprocess is None else self._preprocess(obj, element)

    #: ``(envoy, value)``: raises ValueError where the value has other rows than those of the invoke that asks.
    _check_rows = refuse_mixed_rows

    def _write_back(self, obj: Any, view: Any, raw: Any) -> Any:
        return self._pack(obj, raw, self._transform(obj, view, self._pick(obj, raw)))

    # -- one element of what a location serves ------------------------------------------------------------------------

    def _selected(self, obj: Any) -> tuple[str, Any]:
        select = self.select(obj) if callable(self.select) else self.select
        return parsed(self.path(obj))[3], select

    def _pick(self, obj: Any, raw: Any) -> Any:
        try:
            return pick(raw, *self._selected(obj))
        except LookupError as error:
            raise ValueError(f"{self.name} of {obj.path} is not in this call: {error}") from error

    def _pack(self, obj: Any, raw: Any, value: Any) -> Any:
        return pack(raw, *self._selected(obj), value)

    # -- writing ----------------------------------------------------------------------------------------------------

    def __set__(self, obj: Any, value: Any) -> None:
        if isinstance(value, Envoy):  # a child that has this name: mounted as nnsight mounts one called `output`
            mounted = f"{Envoy.OVERLOAD_PREFIX}{self.name}"
            obj.__dict__[mounted], obj._aliases[mounted] = value, self.name
            return
        location = self._in_this_run(obj)
        raw = self._served(obj, location)
        replaced = self._view(obj, self._pick(obj, raw))
        self._check_rows(obj, replaced)
        self.check(obj, value, replaced)
        if self._postprocess is not None:
            value = self._postprocess(obj, value)
        Mediator.swap(location, self._pack(obj, raw, value))

    def check(self, obj: Any, value: Any, replaced: Any) -> None:
        """Raise ValueError or TypeError where ``value`` is not shaped like ``replaced``, which it is to replace."""
        if not isinstance(replaced, torch.Tensor):
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{self._what(obj)} takes a tensor of shape {tuple(replaced.shape)}, not {type(value).__name__}"
            )
        free = [axis in self.resizable for axis in self.dims or ()] or [False] * replaced.dim()
        if value.dim() != replaced.dim() or any(
            not loose and got != expected
            for loose, got, expected in zip(free, value.shape, replaced.shape, strict=True)
        ):
            raise ValueError(
                f"{self._what(obj)} takes shape {tuple(replaced.shape)} in this call, and {tuple(value.shape)} was "
                f"assigned; nothing is broadcast, so .expand(), slice or reshape it first"
            )
        for kind, change in (("dtype", "cast it with .to()"), ("device", "move it there")):
            expected, got = getattr(replaced, kind), getattr(value, kind)
            if got != expected:
                raise ValueError(f"{self._what(obj)} takes {expected}, and {got} was assigned; {change}")

    def _what(self, obj: Any) -> str:
        """What an error says takes something else."""
        what = f"{self.name} of {obj.path}"
        return what if self.layout is None else f"{what} is {self.layout_name or 'laid out'} {axes(self.layout)}: it"


def _rebuild(cls: type, state: dict) -> "EProperty":
    value = cls.__new__(cls)
    value.__dict__.update(state)
    return value


def unavailable(reason: str) -> EProperty:
    """A value a family does not have: assign it in the class body in place of the inherited one.

    The name stays in the tree, in the repr and in ``support()`` with ``reason``; any access raises `Unavailable` with
    it.
    """
    return EProperty(description=reason, unavailable=reason)


def role(envoy: Any) -> str:
    """What to call ``envoy`` in a message: block, attention, model."""
    return getattr(type(envoy), "ROLE", None) or envoy.path.rsplit(".", 1)[-1]
