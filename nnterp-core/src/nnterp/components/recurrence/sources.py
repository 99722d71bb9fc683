"""The kernels' own source: which implementation stands behind a name, and copies that serve from within."""

import ast
import weakref
from collections.abc import Callable
from typing import Any

from nnsight.intervention.source import SourceNotAvailable, source_tree

from nnterp.components.definitions import CannotTap, bodies, targets
from nnterp.components.taps import recompiled

#: transformers' kernels that are loops over tokens: the variable that holds the state.
PER_TOKEN = {
    "torch_recurrent_gated_delta_rule": "last_recurrent_state",
    "recurrent_kimi_delta_attention": "last_recurrent_state",
    "mamba_selective_scan": "ssm_state",
    "mamba_selective_state_update": "ssm_state",
    "_rnn_scan": "recurrent_states",
}

#: Those of them that take a single token past the loop, which does the same to it.
SINGLE_TOKEN = {"_rnn_scan": "hidden_states.shape[1] == 1"}

#: Kernels that hold the state at the boundaries of chunks in one tensor: its variable.
BOUNDARIES = {"mamba2_chunk_scan": "new_states"}

CALL = "__call"


def plain(kernel: Callable) -> Callable:
    """transformers' own function behind ``kernel``, which may dispatch to another package's."""
    function = getattr(kernel, "__func__", kernel)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def compiled(kernel: Callable) -> Any | None:
    """The function of another package that ``kernel`` dispatches to, or None where transformers' own runs.

    transformers' dispatcher closes over ``implementation`` and ``torch_function`` (5.19.0 and 5.24.0).
    """
    while kernel is not None:
        code = getattr(kernel, "__code__", None)
        cells = dict(zip(code.co_freevars, kernel.__closure__ or (), strict=True)) if code is not None else {}
        if "implementation" in cells and "torch_function" in cells:
            found = cells["implementation"].cell_contents
            return None if found is cells["torch_function"].cell_contents else found
        kernel = getattr(kernel, "__wrapped__", None)
    return None


def package(function: Callable) -> str:
    """The package that ``function`` comes from."""
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


# -- copies -----------------------------------------------------------------------------------------------------------

_copies: "weakref.WeakKeyDictionary[Callable, Callable | None]" = weakref.WeakKeyDictionary()


def serving_copy(kernel: Callable) -> Callable | None:
    """A copy of transformers' own function behind ``kernel`` that takes the `KernelCall` before its parameters and
    serves through it; None where there is nothing to serve within. Raises CannotTap where there ought to be.
    """
    function = plain(kernel)
    if function not in _copies:
        _copies[function] = copied(function)
    copy = _copies[function]
    owner = getattr(kernel, "__self__", None)
    if copy is None or owner is None:
        return copy
    return lambda call, *args, **kwargs: copy(call, owner, *args, **kwargs)


def copied(function: Callable) -> Callable | None:
    try:
        tree, first, _ = source_tree(function.__code__)
    except (SourceNotAvailable, AttributeError) as error:
        raise CannotTap(f"{getattr(function, '__qualname__', function)} has no Python source") from error
    definition = tree.body[0]
    definition.decorator_list = []
    always_looping(definition, SINGLE_TOKEN.get(function.__name__))
    found = [
        gated(definition),
        variable_after(definition, PER_TOKEN.get(function.__name__), "token"),
        variable_after(definition, BOUNDARIES.get(function.__name__), "boundaries"),
    ]
    if not any(found):
        return None
    definition.args.args.insert(0, ast.arg(CALL))
    return recompiled(function, tree, definition, first)


def through(method: str, variable: str, at: ast.stmt) -> ast.stmt:
    """The statement ``variable = __call.method(variable)``."""
    statement = ast.parse(f"{variable} = {CALL}.{method}({variable})").body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    return statement


def gated(definition: ast.FunctionDef) -> bool:
    """Serve the outputs before ``if z is not None: outputs = outputs * silu(z)``."""
    for body in bodies(definition):
        for index, statement in enumerate(body):
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "z is not None":
                body.insert(index, through("outputs", *targets(statement), statement))
                return True
    return False


def always_looping(definition: ast.FunctionDef, single_token: str | None) -> None:
    """Send every call through the loop: the branch on the condition ``single_token`` is never taken."""
    if single_token is None:
        return
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and ast.unparse(node.test) == single_token:
            node.test = ast.copy_location(ast.Constant(False), node.test)
            return
    raise CannotTap(f"{definition.name} does not branch on {single_token}")


def variable_after(definition: ast.FunctionDef, variable: str | None, method: str) -> bool:
    """Serve ``variable`` after the last statement that gives it a value: for ``token``, in the loop over tokens."""
    if variable is None:
        return False
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For)] if method == "token" else []
    for body in [loop.body for loop in loops] or [definition.body]:
        found = [index for index, statement in enumerate(body) if variable in targets(statement)]
        if found:
            body.insert(found[-1] + 1, through(method, variable, body[found[-1]]))
            return True
    raise CannotTap(f"{definition.name} gives {variable} no value where it is looked for")
