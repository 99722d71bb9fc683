"""Reading the definition of a function: its statements, the calls in them, and what they assign.

What the rules of `nnterp.components.taps` find their places with. A definition that is not written as a rule expects is
refused (`CannotTap`), never guessed at.
"""

import ast
from typing import Any


class CannotTap(ValueError):
    """The function is not written the way a rule expects; the message says what is missing."""


def bodies(node: ast.AST):
    """Every list of statements under ``node``, innermost first."""
    for child in ast.iter_child_nodes(node):
        yield from bodies(child)
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block


def own(statement: ast.stmt) -> ast.AST:
    """``statement`` without the blocks nested in it: what it evaluates itself."""
    if isinstance(statement, (ast.If, ast.While)):
        return statement.test
    if isinstance(statement, (ast.For, ast.With, ast.Try, ast.FunctionDef)):
        return ast.Pass()
    return statement


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of ``name`` (a function, a method or a child module) under ``node``, in source order."""
    found = [
        child
        for child in ast.walk(node)
        if isinstance(child, ast.Call)
        and name == (getattr(child.func, "attr", None) or getattr(child.func, "id", None))
    ]
    return sorted(found, key=lambda call: (call.end_lineno, call.end_col_offset))


def targets(statement: ast.stmt) -> set[str]:
    """The names ``statement`` assigns, in its branches too."""
    found = [node.targets for node in ast.walk(statement) if isinstance(node, ast.Assign)]
    found += [[node.target] for node in ast.walk(statement) if isinstance(node, (ast.AugAssign, ast.AnnAssign))]
    return {leaf.id for group in found for target in group for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def computes(statement: ast.stmt, variable: str) -> bool:
    """Whether ``statement`` gives ``variable`` a value that is not just another name's."""
    return variable in targets(statement) and not (
        isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)
    )


def nth(found: list, occurrence: int, what: str, definition: ast.FunctionDef) -> Any:
    if not -len(found) <= occurrence < len(found):
        raise CannotTap(f"{definition.name} has {len(found)} of {what}, not one at {occurrence}")
    return found[occurrence]


def is_factor(side: ast.expr, attribute: str) -> bool:
    """Whether ``side`` is ``self.<attribute>`` or a method's result of it."""
    if isinstance(side, ast.Call) and isinstance(side.func, ast.Attribute):
        side = side.func.value
    return isinstance(side, ast.Attribute) and side.attr == attribute


def parsed(code: str, at: ast.AST) -> ast.expr:
    """The expression ``code``, placed where ``at`` is."""
    tree = ast.parse(code, mode="eval").body
    for node in ast.walk(tree):
        ast.copy_location(node, at)
    return tree
