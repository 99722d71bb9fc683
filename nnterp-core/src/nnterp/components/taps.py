"""Copies of a function that serve values to a trace at locations of our own.

Some values are no module's input or output: the residual stream between two sublayers, a contribution that is scaled in
the same line that adds it, the scores inside an attention function. A *tap* is a statement or expression added to a
copy of the function that computes them: ``x = __serve__(self, "layer_mid", x)`` hands ``x`` to the running trace under
``"{module path}.layer_mid"`` and takes back what the trace left there. Reads, in-place edits and assignments therefore
act on the variable every later statement uses.

A rule says where the tap goes in terms of what the code does (the stream handed to a module, the argument of a call),
not of line numbers or operation labels, so it holds from release to release; a function a rule does not fit is refused
with a reason (`CannotTap`), never guessed. The copy is made once per function and installed as the body of nnsight's
controller when a run starts, which is what keeps the count of visits right at a late step of ``generate``.
"""

import ast
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from nnsight.intervention.source import (
    OP,
    STATE,
    Instrument,
    SourceNotAvailable,
    decorator_chain,
    rewrap,
    source_tree,
)

from nnterp.components.definitions import (
    CannotTap,
    bodies,
    calls,
    computes,
    is_factor,
    nth,
    own,
    parsed,
    targets,
)

SERVE = "__serve__"

#: The attribute of a run's interleaver that says in which call of its module each location was visited last.
VISITS = "visits"

#: What a rule's statements may call beside `serve`, by the name they call it: closed over by every copy.
HELPERS: dict[str, Callable] = {}

#: A rule receives the function's definition and the native name of each standard child, and puts its tap in.
Rule = Callable[[ast.FunctionDef, str, Mapping[str, str]], None]


def serve(module: Any, name: str, value: Any, split: tuple[int, int] | None = None, apart: bool = False) -> Any:
    """Hand ``value`` to the trace that ``module`` runs in, under ``name``; return it, edited if the trace wrote to it.

    With ``split``, ``(batch, seq)``, the trace sees the first axis of ``value`` as these two; with ``apart``, a copy.
    """
    state = module.__dict__.get(STATE)
    if state is None:
        return value
    interleaver, path, locations = state.active()
    if interleaver is None:
        return value
    if apart:
        value = value.clone()
    location = visited(interleaver, path, locations[0], name)
    if split is None:
        return interleaver.handle(location, value)
    return interleaver.handle(location, value.unflatten(0, split)).flatten(0, 1)


def visited(interleaver: Any, path: str, entry: str, name: str) -> str:
    """The location ``name`` of the module at ``path`` as this visit serves it: ``name_1``, … from the second on.

    A forward may come past a place more than once (a loop, two calls of the attention interface). Numbering them within
    one call of the module, which ``entry`` counts, keeps the n-th visit of a location the n-th call of its module,
    which is what a step of ``generate`` is counted by.
    """
    location = first = f"{path}.{name}"
    visits = getattr(interleaver, VISITS, None)
    if visits is None:  # not of a standardized model: of one that wraps the same modules, or a server's
        visits = interleaver.visits = {}
    call, number = interleaver.counts.get(entry), 0
    while visits.get(location, -1) == call:
        number += 1
        location = f"{first}_{number}"
    visits[location] = call
    return location


# -- rules ------------------------------------------------------------------------------------------------------------


def stream_before(child: str) -> Rule:
    """The variable that is handed to module ``child`` (a standard name), where it was last computed.

    Placed before any other name is bound to the same tensor (``residual = hidden_states``), so an assignment changes
    the stream itself and not only what the module receives.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        native = natives.get(child, child)
        for body in bodies(definition):
            for index, statement in enumerate(body):
                for call in calls(own(statement), native):
                    if not (isinstance(call.func, ast.Attribute) and call.args and isinstance(call.args[0], ast.Name)):
                        continue
                    variable = call.args[0].id
                    before = [i for i in range(index) if computes(body[i], variable)]
                    if before:
                        return insert(body, before[-1] + 1, definition, name, variable)
        raise CannotTap(f"no variable is computed and handed to self.{native} in {definition.name}")

    return apply


def argument(callee: str, position: int = 0, occurrence: int = 0) -> Rule:
    """The argument at ``position`` of the ``occurrence``-th call of ``callee`` (its last name: ``F.softmax`` is
    ``softmax``).
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        call = nth(calls(definition, natives.get(callee, callee)), occurrence, callee, definition)
        if len(call.args) <= position:
            raise CannotTap(f"{callee} is called with {len(call.args)} positional arguments in {definition.name}")
        call.args[position] = served(definition, name, call.args[position])

    return apply


def result(callee: str, occurrence: int = 0) -> Rule:
    """What the ``occurrence``-th call of ``callee`` returns."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        replace(definition, name, nth(calls(definition, natives.get(callee, callee)), occurrence, callee, definition))

    return apply


def product(attribute: str, occurrence: int = 0) -> Rule:
    """The ``occurrence``-th product with ``self.<attribute>``, or with what a method of it returns (``.tanh()``): a
    contribution scaled in the line that adds it.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        found = [
            node
            for node in ast.walk(definition)
            if isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and any(is_factor(side, attribute) for side in (node.left, node.right))
        ]
        found.sort(key=lambda node: (node.lineno, node.col_offset))
        replace(definition, name, nth(found, occurrence, f"a product with {attribute}", definition))

    return apply


def sum_of(left: str, right: str, occurrence: int = 0) -> Rule:
    """The variable that the ``occurrence``-th statement of the form ``x = left + right`` assigns, right behind it."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        places = [
            (body, index, statement.targets[0].id)
            for body in bodies(definition)
            for index, statement in enumerate(body)
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and ast.unparse(statement.value) == f"{left} + {right}"
        ]
        body, index, variable = nth(places, occurrence, f"a sum {left} + {right}", definition)
        insert(body, index + 1, definition, name, variable)

    return apply


def assigned(
    variable: str | tuple[str, ...], occurrence: int = -1, before: str | None = None, after: str | None = None
) -> Rule:
    """``variable`` (or several, served as a tuple) after the ``occurrence``-th statement that assigns it.

    With ``before``, right before the first statement that calls it instead; with ``after``, right behind that
    statement. A statement that assigns the variable, or calls ``after``, inside a branch counts as one.
    """
    names = (variable,) if isinstance(variable, str) else variable

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        for body in reversed([*bodies(definition)]):  # the outermost first: a branch is one statement of its body
            if before is not None:
                found = [i for i, s in enumerate(body) if calls(own(s), natives.get(before, before))][:1]
            elif after is not None:
                found = [i + 1 for i, s in enumerate(body) if calls(s, natives.get(after, after))][:1]
            else:
                found = [i + 1 for i, s in enumerate(body) if names[-1] in targets(s)]
            if found and (before or after or -len(found) <= occurrence < len(found)):
                return insert(body, found[0 if before or after else occurrence], definition, name, *names)
        raise CannotTap(f"no statement assigns {', '.join(names)} as expected in {definition.name}")

    return apply


def entering(expression: str) -> Rule:
    """The value of ``expression``, of the arguments, when the forward begins; what is written to it has no effect."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        first = definition.body[0]
        value = served(definition, name, parsed(expression, first))
        definition.body.insert(0, ast.copy_location(ServeExpr(value), first))

    return apply


def each(*rules: Rule) -> Rule:
    """One location served at several places: those of ``rules``, in branches of which a call takes one."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        for rule in rules:
            rule(definition, name, natives)

    return apply


def unflattened(rule: Rule, shape: str) -> Rule:
    """What ``rule`` serves, its first axis split into batch and sequence as the variable ``shape`` has them.

    For a forward that flattens the two: the trace then sees the value as everywhere, and each invoke its own rows.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        rule(definition, name, natives)
        for node in ast.walk(definition):
            if isinstance(node, ServeCall) and node.args[1].value == name:
                node.args.append(parsed(f"{shape}[:2]", node))

    return apply


def apart(rule: Rule, when: str = "True") -> Rule:
    """What ``rule`` serves, as a tensor of its own: an argument that is also another value, edited apart from it.

    With ``when``, an expression of the forward's variables, only where that holds.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        rule(definition, name, natives)
        for node in ast.walk(definition):
            if isinstance(node, ServeCall) and node.args[1].value == name:
                node.keywords.append(ast.keyword("apart", parsed(when, node)))

    return apply


# -- writing one ------------------------------------------------------------------------------------------------------


class ServeCall(ast.Call):
    """A call of `serve`: nnsight's own instrumentation leaves it unnumbered."""


class ServeExpr(ast.Expr):
    """A served value that no variable holds."""


class ServeAssign(ast.Assign):
    """An assignment of a served variable."""


def served(definition: ast.FunctionDef, name: str, expression: ast.expr) -> ast.expr:
    module = ast.Name(id=definition.args.args[0].arg, ctx=ast.Load())
    call = ServeCall(ast.Name(id=SERVE, ctx=ast.Load()), [module, ast.Constant(name), expression], [])
    return ast.copy_location(call, expression)


def replace(definition: ast.FunctionDef, name: str, target: ast.expr) -> None:
    for parent in ast.walk(definition):
        for field, value in ast.iter_fields(parent):
            if value is target:
                return setattr(parent, field, served(definition, name, target))
            if isinstance(value, list) and any(item is target for item in value):
                value[:] = [served(definition, name, target) if item is target else item for item in value]
                return None
    raise CannotTap(f"{definition.name}: the expression stands alone")


def insert(body: list, index: int, definition: ast.FunctionDef, name: str, *variables: str) -> None:
    def group(context: ast.expr_context) -> ast.expr:
        names = [ast.Name(id=variable, ctx=context) for variable in variables]
        return names[0] if len(names) == 1 else ast.Tuple(names, context)

    tap = ServeAssign([group(ast.Store())], served(definition, name, group(ast.Load())))
    for node in ast.walk(tap):
        ast.copy_location(node, body[index - 1] if index else body[0])
    body.insert(index, tap)


class Numbered(Instrument):
    """nnsight's instrumentation, which must not count our own statements among the operations it labels."""

    def visit_ServeCall(self, node: ServeCall) -> ast.AST:
        node.args[2] = self.visit(node.args[2])
        return node

    def visit_ServeAssign(self, node: ServeAssign) -> ast.AST:
        return node

    visit_ServeExpr = visit_ServeAssign


def tapped(function: Callable, rules: Mapping[str, Rule], natives: Mapping[str, str]) -> Callable:
    """A copy of ``function`` with the taps of ``rules`` in it, its decorators kept; raises `CannotTap`."""
    inner, chain = decorator_chain(function)
    try:
        tree, first, _ = source_tree(inner.__code__)
    except (SourceNotAvailable, AttributeError) as error:
        raise CannotTap(f"{getattr(function, '__qualname__', function)} has no Python source") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        raise CannotTap(f"{inner.__qualname__} is not a plain function of a module")
    definition.decorator_list = []
    for name, rule in rules.items():
        rule(definition, name, natives)
    if OP in inner.__globals__:  # somebody drilled into `.source`: the copy keeps those operations
        tree = Numbered().visit(tree)
    return rewrap(chain, recompiled(inner, tree, definition, first))


def recompiled(inner: FunctionType, tree: ast.Module, definition: ast.FunctionDef, first: int) -> FunctionType:
    """``inner`` with ``definition`` for its code, closing over the same cells and naming the same lines of its file.

    What the taps call is closed over too, so the copy shares the globals of ``inner``: what somebody replaces in the
    module that defines it is replaced in the copy, and ``torch.compile`` finds every name where it looks for it.
    """
    own = {name: CellType(function) for name, function in {SERVE: serve, **HELPERS}.items()}
    cells = {**dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)), **own}
    shell = ast.parse(f"def shell({', '.join(cells)}): pass").body[0]
    shell.body = [definition, ast.Return(ast.Name(id=definition.name, ctx=ast.Load()))]
    tree.body[0] = ast.copy_location(shell, definition)
    ast.increment_lineno(tree, first - 1)
    module = compile(ast.fix_missing_locations(tree), inner.__code__.co_filename, "exec", dont_inherit=True)
    outer = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    code = next(c for c in outer.co_consts if isinstance(c, CodeType) and c.co_name == definition.name)
    closure = tuple(cells[name] for name in code.co_freevars)
    copy = FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = inner.__kwdefaults__, inner.__qualname__
    return copy
