"""Serving the inside of softmax attention at the call every attention module makes.

transformers' modules look their attention up with ``AttentionInterface.get_interface`` and call what it returns with
the queries, keys and values. While a run is under way that look-up returns the same function, serving: the three inputs
at ``{path}.attention_inputs`` and the output at ``{path}.attention_head_outputs``, under every implementation. Scores
and probabilities only exist inside an eager function; a copy of that function with two taps serves them
(`nnterp.components.taps`). Outside a run the look-up is transformers' own.
"""

import ast
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from nnsight.intervention.source import STATE
from torch import nn

from nnterp.components.taps import CannotTap, calls, insert, tapped, targets

INPUTS = "attention_inputs"
SCORES = "attention_scores"
PROBABILITIES = "attention_probabilities"
HEAD_OUTPUTS = "attention_head_outputs"

#: Where the head axis is in each location: what a tensor-parallel run gathers over.
HEAD_AXIS = {INPUTS: 1, SCORES: 1, PROBABILITIES: 1, HEAD_OUTPUTS: 2}


# -- the two taps of an eager attention function
# ------------------------------------------------------------------------


def anatomy(definition: ast.FunctionDef) -> tuple[int, str, int, str]:
    """Where an eager function holds its masked scores and its probabilities: ``(index, variable)`` of each.

    The scores are the variable the first matmul is kept in, after the last statement that mentions ``attention_mask``
    and before the softmax (so before an attention sink joins them); the probabilities are what the last matmul
    multiplies with the values.
    """
    body = definition.body
    softmax = [i for i, s in enumerate(body) if calls(s, "softmax")]
    products = [i for i, s in enumerate(body) if calls(s, "matmul")]
    if not softmax or len(products) < 2:
        raise CannotTap(f"{definition.name} has no softmax between two matmuls")
    first, last = products[0], products[-1]
    kept = [name for name in targets(body[first]) if not isinstance(body[first], ast.If)]
    mixed = calls(body[last], "matmul")[-1].args[0]
    while isinstance(mixed, (ast.Call, ast.Attribute)):  # probabilities.to(dtype) is still the probabilities
        mixed = mixed.func if isinstance(mixed, ast.Call) else mixed.value
    if len(kept) != 1 or not isinstance(mixed, ast.Name):
        raise CannotTap(f"{definition.name} keeps its scores or probabilities in no variable of their own")
    masked = [
        i
        for i, s in enumerate(body)
        if isinstance(s, (ast.If, ast.Assign)) and mentions(s, "attention_mask") and i < softmax[0]
    ]
    at = masked[-1] + 1 if masked else softmax[0]
    if (
        not first < at <= softmax[0] < last
        or (masked and kept[0] not in targets(body[masked[-1]]))
        or not any(mentions(s, kept[0]) for s in body[at : softmax[0] + 1])
    ):
        raise CannotTap(f"{definition.name} does not mask its scores and put them through the softmax")
    return at, kept[0], last, mixed.id


def mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(child, ast.Name) and child.id == name for child in ast.walk(node))


def probabilities(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
    _, _, at, variable = anatomy(definition)
    insert(definition.body, at, definition, name, variable)


def scores(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
    at, variable, _, _ = anatomy(definition)
    insert(definition.body, at, definition, name, variable)


#: In this order: the later statement first, so the earlier one's place still holds.
EAGER = {PROBABILITIES: probabilities, SCORES: scores}

_eager_copies: "weakref.WeakKeyDictionary[Callable, Any]" = weakref.WeakKeyDictionary()


def eager_copy(attend: Callable) -> Callable | str:
    """The copy of ``attend`` that serves scores and probabilities, or why there is none."""
    try:
        if attend not in _eager_copies:
            _eager_copies[attend] = tapped(attend, EAGER, {})
    except CannotTap as error:
        _eager_copies[attend] = str(error)
    return _eager_copies[attend]


# -- the call, serving ------------------------------------------------------------------------------------------------


def serving_call(attend: Callable) -> Callable:
    """``attend``, serving the run its module takes part in.

    A closure that calls ``attend`` by name: nnsight's ``.source`` looks through that, and not through a ``partial``.
    """

    def attention_interface(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        state = module.__dict__.get(STATE)
        interleaver, path, _ = state.active() if state is not None else (None, None, ())
        if interleaver is None:
            return attend(module, query, key, value, *args, **kwargs)
        query, key, value = interleaver.handle(f"{path}.{INPUTS}", (query, key, value))
        copy = eager_copy(attend)
        run = attend if isinstance(copy, str) else copy
        output, *rest = run(module, query, key, value, *args, **kwargs)
        return interleaver.handle(f"{path}.{HEAD_OUTPUTS}", output), *rest

    return attention_interface


_serving: dict[Callable, Callable] = {}
_lock = threading.Lock()
_runs = 0
_plain_lookup: Callable | None = None


def serving_lookup(self: Any, *args: Any, **kwargs: Any) -> Callable:
    attend = _plain_lookup(self, *args, **kwargs)
    if attend not in _serving:
        _serving[attend] = serving_call(attend)
    return _serving[attend]


def start_serving() -> None:
    """Make every attention look-up serve, until `stop_serving` has been called as often."""
    global _runs, _plain_lookup
    from transformers import AttentionInterface

    with _lock:
        if _runs == 0:
            _plain_lookup = AttentionInterface.get_interface
            AttentionInterface.get_interface = serving_lookup
        _runs += 1


def stop_serving() -> None:
    global _runs
    from transformers import AttentionInterface

    with _lock:
        _runs -= 1
        if _runs == 0:
            AttentionInterface.get_interface = _plain_lookup


def serve_always() -> None:
    """Serve from here on, in a process that runs a plain model for requests with standard values (a remote server)."""
    if _runs == 0:
        start_serving()
