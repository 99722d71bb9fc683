"""Standard values on the engine's tensors: one unpadded sequence, handed out as a private copy with a batch axis of 1.

vLLM runs all requests of a step as one run of tokens, ``[tokens, width]``, and nnsight serves each request its own. Its
kernels write into the buffers they read, so what is handed to a block is a copy, and goes back when the block moves on:
in-place edits land as an assignment does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator
from torch import Tensor

from nnterp.components.eproperty import EProperty
from nnterp.components.layouts import HEADS, KV_HEADS

#: The axes of heads, each the name of the size that says how many there are.
HEAD_AXES = (HEADS, KV_HEADS, "heads")

#: Where the two halves of a stream are among the arguments of a block: position and keyword.
Halves = tuple[tuple[int, str], ...]


class Flat(EProperty):
    """A value of an engine's module, whose tensor is ``[tokens, width]`` (``[1, tokens, width]`` in a module that
    transformers wrote), with heads apart where the layout says so.

    Args:
        read_only: Why it cannot be written, for the AttributeError that an assignment raises.
        factor: ``factor(envoy)``, what the engine's tensor is multiplied by to be this value. Where nothing is written
            the tensor stays as it came, whatever the two products round to.
    """

    def __init__(
        self, *args: Any, read_only: str | None = None, factor: Callable[[Any], float] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.read_only = read_only
        self.factor = factor
        if read_only is None:
            self._transform = _as_it_is

    #: The function that defines the value, where that is another component's.
    defined: Callable | None = None

    @property
    def _annotated(self) -> Callable | None:
        return self.defined or self._preprocess

    def _check_rows(self, obj: Any, value: Any) -> None:
        """A request's tokens are its own: its batch axis is always 1."""

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        value = super().__get__(obj, owner)
        if obj is not None and self.read_only is None:
            mediator = getcurrent().mediator  # a weak reference: a request's block is not to keep itself alive
            vars(mediator()).setdefault("flush", partial(hand_back, mediator))
        return value

    def _view(self, obj: Any, element: Any) -> Any:
        if not isinstance(element, Tensor):
            return EProperty._view(self, obj, element)
        laid_out = self._laid_out(obj, element)
        if not self._fresh(obj):
            laid_out = laid_out.clone(memory_format=torch.contiguous_format)
        return EProperty._view(self, obj, laid_out)

    def _fresh(self, obj: Any) -> bool:
        """Whether what `_pick` gives is a tensor of its own already."""
        return False

    def _laid_out(self, obj: Any, element: Tensor) -> Tensor:
        """``element`` with the axes of the layout, its memory the engine's where no factor applies."""
        served = element if self._batched(element) else element.unsqueeze(0)
        count = self._heads(obj)
        if count is not None:
            served = served.unflatten(-1, (count, -1))
            served = served.transpose(1, 2) if self.dims[1] in HEAD_AXES else served
        return served if self.factor is None else served * self.factor(obj)

    def _pack(self, obj: Any, raw: Any, value: Any) -> Any:
        element = self._pick(obj, raw)
        if self._heads(obj) is not None:
            value = value.transpose(1, 2) if self.dims[1] in HEAD_AXES else value
            value = value.flatten(-2)
        value = value.reshape(element.shape)
        if self.factor is not None:
            factor = self.factor(obj)
            value = torch.where(value != element * factor, value / factor, element)
        return EProperty._pack(self, obj, raw, value)

    def _write_back(self, obj: Any, view: Any, raw: Any) -> Any:
        # None where nothing was written: what the engine has stays, as two halves of a stream are not always their sum.
        if isinstance(view, Tensor) and torch.equal(view, self._laid_out(obj, self._pick(obj, raw))):
            return None
        return EProperty._write_back(self, obj, view, raw)

    def _batched(self, element: Tensor) -> bool:
        return element.dim() == 3 and element.shape[0] == 1

    def _heads(self, obj: Any) -> int | None:
        """How many heads the last axis of the tensor is split into, None where the layout has none."""
        layout, axis = self._split
        if layout is not self.layout:
            axis = next((axis for axis in HEAD_AXES if axis in (self.dims or ())), None)
            self._split = self.layout, axis
        return None if axis is None else getattr(obj, axis)

    #: The layout, and its axis of heads if there is one.
    _split: tuple[Any, str | None] = (..., None)

    def __set__(self, obj: Any, value: Any) -> None:
        if self.read_only is not None:
            raise AttributeError(f"{self.name} of {obj.path} is read-only on this engine: {self.read_only}")
        super().__set__(obj, value)


def hand_back(mediator: Callable[[], Mediator | None]) -> None:
    """`Mediator.flush`, without the swap of a value that was read and not written to."""
    block = mediator()
    waiting = block.transform
    if waiting is None or not isinstance(waiting.eproperty, Flat):
        return Mediator.flush(block)
    edited = waiting.fn()
    block.transform = None if edited is None else waiting._replace(fn=lambda: edited)
    Mediator.flush(block)


def _as_it_is(envoy: Any, view: Any, element: Any) -> Any:
    return view


class Stream(Flat):
    """The residual stream, which fused blocks hand on in two halves: what was added last, and the rest.

    Read as their sum. Where it is written, the rest is the value and the other half zero, which sums to the value
    exactly.

    Args:
        halves: The attribute of the host that says where they are among the arguments of what `key` leads to.
    """

    def __init__(self, *args: Any, halves: str = "HALVES", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.halves = halves

    def _halves(self, obj: Any, raw: Any) -> tuple[Tensor, Tensor | None]:
        """The two halves in ``raw``; the second None where it is handed on whole."""
        if isinstance(raw, Tensor):
            return raw, None
        if not self._of_inputs(raw):
            return raw[0], raw[1] if len(raw) > 1 and isinstance(raw[1], Tensor) and obj.FUSED else None
        args, kwargs = raw
        found = [
            args[index] if index < len(args) else kwargs.get(keyword) for index, keyword in getattr(obj, self.halves)
        ]
        return found[0], found[1] if obj.FUSED else None

    @staticmethod
    def _of_inputs(raw: Any) -> bool:
        return len(raw) == 2 and isinstance(raw[0], tuple) and isinstance(raw[1], dict)

    def _pick(self, obj: Any, raw: Any) -> Any:
        added, rest = self._halves(obj, raw)
        if rest is not None:
            return added + rest
        return added.clone() if obj.FUSED else added

    def _fresh(self, obj: Any) -> bool:
        return obj.FUSED

    def _pack(self, obj: Any, raw: Any, value: Any) -> Any:
        added, rest = self._halves(obj, raw)
        value = value.reshape(added.shape)
        new = (value, None)
        if rest is not None:
            # Where nothing was written both halves stay as they came: the norm sums them in a wider dtype than theirs.
            written = value != added + rest
            new = (added.masked_fill(written, 0), torch.where(written, value, rest))
        if isinstance(raw, Tensor):
            return new[0]
        if not self._of_inputs(raw):
            return (new[0], *((new[1],) if rest is not None else raw[1:2]), *raw[2:])
        args, kwargs = list(raw[0]), dict(raw[1])
        for (index, keyword), half, old in zip(getattr(obj, self.halves), new, (added, rest), strict=False):
            if old is None:
                continue
            if index < len(args):
                args[index] = half
            else:
                kwargs[keyword] = half
        return tuple(args), kwargs


#: What `on_engine` takes for the value's own class.
OPTIONS = ("read_only", "factor", "halves")


def on_engine(value: EProperty, key: str | Callable = ..., kind: type = Flat, **place: Any) -> EProperty:
    """``value`` of a transformers component, as the engine's tensors have it; at another place where one is given."""
    options = {name: place.pop(name) for name in OPTIONS if name in place}
    moved, flat = value.at(key, **place), kind(**options)
    own = {name: vars(flat)[name] for name in ("_transform", *OPTIONS) if name in vars(flat)}
    vars(flat).update(vars(moved))
    # Read off the original, which says what it is; how it is laid out here is this class's.
    vars(flat).update(own, _layout=moved.layout, defined=moved._annotated, _preprocess=None, _postprocess=None)
    return flat
