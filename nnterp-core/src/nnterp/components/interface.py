"""Serving the inside of softmax attention at the call every attention module makes.

transformers' modules look their attention up with ``AttentionInterface.get_interface`` and call what it returns with
the queries, keys and values. While a run is under way that look-up returns the same function, serving: the three inputs
at ``{path}.attention_inputs`` and the output at ``{path}.attention_head_outputs``, under every implementation. Scores
and probabilities only exist inside an eager function; a copy of that function with two taps serves them
(`nnterp.components.taps`). Outside a run the look-up is transformers' own.

Some modules do what an eager function does in a method of their own (``_attn``). For as long as a run is under way such
a method serves the same way (`own_call`).
"""

import ast
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from nnsight.intervention.source import STATE
from torch import nn

from nnterp.components import runs
from nnterp.components.definitions import CannotTap, calls, targets
from nnterp.components.taps import VISITS, insert, tapped, visited

INPUTS = "attention_inputs"
SCORES = "attention_scores"
PROBABILITIES = "attention_probabilities"
HEAD_OUTPUTS = "attention_head_outputs"

#: The locations inside an attention call, in the order in which they are served.
INTERIOR = (INPUTS, SCORES, PROBABILITIES, HEAD_OUTPUTS)


# -- the two taps of an eager attention function ----------------------------------------------------------------------


def anatomy(definition: ast.FunctionDef) -> tuple[int, str, int, str]:
    """Where an eager function holds its masked scores and its probabilities: ``(index, variable)`` of each.

    The scores are the variable that enters the softmax (or is joined with an attention sink on the way there), after
    the last statement that computes it; the probabilities are the variable that the second matmul multiplies with the
    values. Both have to come from the first matmul, and the mask has to be in the scores by then, else there is no such
    place.
    """
    name, body = definition.name, definition.body
    softmax = [i for i, s in enumerate(body) if calls(s, "softmax")]
    products = [i for i, s in enumerate(body) if calls(s, "matmul")]
    if not softmax or len(products) != 2 or not products[0] < softmax[0] < products[1]:
        raise CannotTap(f"{name} has no softmax between two matmuls")
    first, last = products
    joined = [i for i in range(first + 1, softmax[0] + 1) if calls(body[i], "cat")]
    end = joined[0] if joined else softmax[0]
    entering = entered(body[end], "cat" if joined else "softmax")
    at = max((i + 1 for i in range(first, end) if entering in targets(body[i])), default=0)
    if not at or entering not in derived(body[first:end]):
        raise CannotTap(f"{name} keeps the scores that enter its softmax in no variable of their own")
    if (
        any(mentions(s, "attention_mask") for s in body[at : softmax[0] + 1])
        or any(
            isinstance(node, ast.BinOp)
            and not isinstance(node.op, ast.Sub)  # a maximum may be subtracted, nothing else
            for s in body[end : softmax[0] + 1]
            for node in ast.walk(s)
        )
    ):
        raise CannotTap(f"{name} goes on changing its scores on the way into the softmax")
    mixed = entered(body[last], "matmul")
    if mixed not in derived(body[first:last]):
        raise CannotTap(f"{name} keeps the pattern it mixes the values with in no variable of its own")
    return at, entering, last, mixed


def entered(statement: ast.stmt, callee: str) -> str | None:
    """The variable that ``statement`` hands ``callee`` first (in a list, for ``cat``), cast or not."""
    argument = calls(statement, callee)[-1].args[0]
    if isinstance(argument, (ast.List, ast.Tuple)):
        argument = argument.elts[0]
    while isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr in CASTS:
        argument = argument.func.value
    return argument.id if isinstance(argument, ast.Name) else None


#: Methods that change a tensor's dtype alone.
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16")


def derived(statements: list[ast.stmt]) -> set[str]:
    """The variables that are computed from what the first of ``statements`` computes, directly or not."""
    found = targets(statements[0])
    for statement in statements[1:]:
        if any(mentions(statement, variable) for variable in found):
            found |= targets(statement)
    return found


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
    copy = _eager_copies.get(attend)
    if copy is None:
        try:
            copy = tapped(attend, EAGER, {})
        except CannotTap as error:
            copy = str(error)
        _eager_copies[attend] = copy
    return copy


# -- the call, serving ------------------------------------------------------------------------------------------------


def serving_call(attend: Callable, heads_first: bool = False) -> Callable:
    """``attend``, serving the run its module takes part in.

    ``heads_first`` where it returns ``[batch, num_heads, seq, head_dim]`` instead of the sequence before the heads. A
    closure that calls ``attend`` by name: nnsight's ``.source`` looks through that, and not through a ``partial``.
    """

    def attention_interface(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        state = module.__dict__.get(STATE)
        interleaver, path, locations = state.active() if state is not None else (None, None, ())
        if interleaver is None or unread(interleaver, path, entry := locations[0]):
            return attend(module, query, key, value, *args, **kwargs)
        if value is key:  # one tensor is both: each is served, edited and differentiated apart from the other
            key, value = key.view_as(key), value.clone()
        query, key, value = interleaver.handle(visited(interleaver, path, entry, INPUTS), (query, key, value))
        copy = eager_copy(attend)
        run = attend if isinstance(copy, str) else copy
        output, *rest = run(module, query, key, value, *args, **kwargs)
        outputs = visited(interleaver, path, entry, HEAD_OUTPUTS)
        if heads_first:  # served with the sequence first, as everywhere: a view, so in-place edits reach the tensor
            return interleaver.handle(outputs, output.transpose(1, 2)).transpose(1, 2), *rest
        return interleaver.handle(outputs, output), *rest

    return attention_interface


@cache
def interior(path: str) -> tuple[str, ...]:
    """The locations inside the attention at ``path``."""
    return tuple(f"{path}.{name}" for name in INTERIOR)


def unread(interleaver: Any, path: str, entry: str) -> bool:
    """Whether nobody has a use for the inside of this call, which then is one visit of each of its locations.

    A worker runs only where what it waits for is handed out. While none waits for something of this module, none can
    begin to during the call.
    """
    visits = getattr(interleaver, VISITS, None)
    if visits is None or interleaver.observers:
        return False
    for location in interleaver.parked:
        if location.startswith(path):
            return False
    locations, counts = interior(path), interleaver.counts
    call = counts.get(entry)
    if visits.get(locations[0], -1) == call:
        return False  # a second call of the interface in one of the module
    for location in locations:  # each from its own: scores have had no visits while another implementation ran
        counts[location] = counts.get(location, 0) + 1
        visits[location] = call
    return True


def serving_lookup(plain: Callable) -> Callable:
    """transformers' look-up of an attention function, answering with the same function, serving."""
    serving: dict[Callable, Callable] = {}

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable:
        attend = plain(self, *args, **kwargs)
        if attend not in serving:
            serving[attend] = serving_call(attend)
        return serving[attend]

    return get_interface


def serve_lookups() -> None:
    """Make every attention look-up serve during runs."""
    from transformers import AttentionInterface

    runs.during_runs(AttentionInterface, "get_interface", serving_lookup)


def own_call(kind: type, name: str) -> Callable:
    """The method ``name`` of the attention class ``kind``, which serves during a run from here on.

    For a module that keeps its attention arithmetic in ``name(query, key, value, mask, ...)`` and does not look it up.
    """
    owner = next(klass for klass in kind.__mro__ if name in vars(klass))
    return runs.during_runs(owner, name, partial(serving_call, heads_first=True))
