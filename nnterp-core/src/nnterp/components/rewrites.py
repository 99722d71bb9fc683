"""Rules that serve nothing: a copy of a forward computes the same numbers in a way that lets values be served.

They stand among a class's ``TAPS`` under any name, and are applied in the order in which they stand there
(`nnterp.components.taps`).
"""

import ast
from collections.abc import Mapping

from nnterp.components.definitions import bodies, nth, parsed, targets
from nnterp.components.taps import Rule


def out_of_place(variable: str) -> Rule:
    """``variable += x`` and ``variable.add_(x)`` become a plain sum: what a trace has read stays what it was."""

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        for body in bodies(definition):
            for index, statement in enumerate(body):
                if isinstance(statement, ast.AugAssign) and targets(statement) == {variable}:
                    value = ast.BinOp(parsed(variable, statement), statement.op, statement.value)
                    body[index] = assignment(variable, value, statement)
                elif calls_in_place(statement, variable):
                    statement.value.func.attr = "add"
                    body[index] = assignment(variable, statement.value, statement)

    return apply


def calls_in_place(statement: ast.stmt, variable: str) -> bool:
    """Whether ``statement`` is ``variable.add_(x)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == f"{variable}.add_"


def recomputed(variable: str, code: str, occurrence: int) -> Rule:
    """``variable`` becomes what ``code``, an expression of the forward's variables, gives, behind the ``occurrence``-th
    statement that assigns it.

    Where the forward counts on what a trace may have changed, or keeps a value in another order than it is served in.
    """

    def apply(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
        found = [(body, i) for body in bodies(definition) for i, s in enumerate(body) if variable in targets(s)]
        body, index = nth(found, occurrence, f"an assignment of {variable}", definition)
        body.insert(index + 1, assignment(variable, parsed(code, body[index]), body[index]))

    return apply


def assignment(variable: str, value: ast.expr, at: ast.stmt) -> ast.Assign:
    """The statement ``variable = value``, placed where ``at`` is."""
    statement = ast.copy_location(ast.Assign([ast.Name(variable, ast.Store())], ast.copy_location(value, at)), at)
    return ast.fix_missing_locations(statement)
