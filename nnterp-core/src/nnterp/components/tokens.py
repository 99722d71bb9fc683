"""Values whose tensors the model holds with batch and sequence flattened into one axis of tokens.

A mixture routes tokens, not sequences, so its router and experts see ``[tokens, ...]``. nnsight scopes a value to an
invoke by its leading axis and leaves such a tensor whole. `TokenEProperty` serves this invoke's rows as ``[batch, seq,
...]``, a view of the model's tensor, and puts an assignment back into the whole. How the tokens lie is noted when the
block is called (`rows`), so it holds under beams and in a decode step as well.
"""

import ast
from collections.abc import Mapping
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.source import STATE

from nnterp.components.definitions import CannotTap
from nnterp.components.eproperty import EProperty
from nnterp.components.taps import HELPERS, Rule

NOTE = "__note_rows__"
ROWS = "__nnterp_rows__"


def note_rows(module: Any, hidden: torch.Tensor) -> None:
    """Keep ``(batch, seq)`` of the tensor ``module`` was just called with, while a trace runs."""
    state = module.__dict__.get(STATE)
    if state is not None and state.active()[0] is not None and hidden.dim() == 3:
        module.__dict__[ROWS] = tuple(hidden.shape[:2])


HELPERS[NOTE] = note_rows


def rows() -> Rule:
    """Notes, when the module is called, how its tokens are laid out in rows. Serves nothing."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        if len(definition.args.args) < 2:
            raise CannotTap(f"{definition.name} takes no hidden states")
        module, hidden = (argument.arg for argument in definition.args.args[:2])
        note = ast.parse(f"{NOTE}({module}, {hidden})").body[0]
        for node in ast.walk(note):
            ast.copy_location(node, definition.body[0])
        start = 1 if ast.get_docstring(definition) is not None else 0
        definition.body.insert(start, note)

    return apply


class TokenEProperty(EProperty):
    """An `EProperty` of a ``[tokens, ...]`` tensor, served as this invoke's ``[batch, seq, ...]``.

    A tensor that already has the rank of the layout passes as it is. In-place edits reach the model's tensor; an
    assignment replaces this invoke's rows of it and leaves the other invokes' as they are.
    """

    def _view(self, obj: Any, element: torch.Tensor) -> Any:
        if element.dim() == len(self.dims):
            return super()._view(obj, element)
        laid_out, own = self._laid_out(obj, element)
        return super()._view(obj, laid_out[own])

    def _pack(self, obj: Any, raw: Any, value: torch.Tensor) -> Any:
        element = self._pick(obj, raw)
        if value.dim() > element.dim():
            laid_out, own = self._laid_out(obj, element)
            if own != slice(None):
                value = torch.cat([laid_out[: own.start], value, laid_out[own.stop :]])
            value = value.flatten(0, 1)
        return super()._pack(obj, raw, value)

    def _laid_out(self, obj: Any, element: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """``element`` as ``[batch, seq, ...]``, and which of its rows are this invoke's."""
        batch, seq = obj._module.__dict__[ROWS]
        if element.shape[0] != batch * seq:  # one token a row: the leading axis is the batch, which nnsight has scoped
            return element.unflatten(0, (-1, 1)), slice(None)
        laid_out = element.unflatten(0, (batch, seq))
        batcher, group = obj.interleaver.batcher, getcurrent().mediator().batch_group
        if batcher is None or not batcher.batching or group is None:
            return laid_out, slice(None)
        if batch != batcher.total:
            raise ValueError(
                f"{self.name} of {obj.path}: the model runs {batch} rows for the {batcher.total} of this trace, so an "
                f"invoke's own cannot be told; trace the invokes on their own"
            )
        return laid_out, slice(group[0], group[0] + group[1])


class Flattened(EProperty):
    """A value with batch and sequence in one axis, at a location that has them apart.

    The read is a view where the location's tensor is contiguous; an assignment is split again.
    """

    def _view(self, obj: Any, element: Any) -> Any:
        return EProperty._view(self, obj, element.flatten(0, 1))

    def _pack(self, obj: Any, raw: Any, value: Any) -> Any:
        return EProperty._pack(self, obj, raw, value.reshape(self._pick(obj, raw).shape))
