"""Serving the inside of a mixture's experts at the call every experts module makes.

transformers keeps the experts of a mixture in 3-D parameters of one module and looks up, per
``experts_implementation``, the function that runs them. While a run is under way that look-up returns a copy of the
function with one tap: each routing slot's weighted output, before the slots are summed. The eager loop adds slots up
one by one and never holds them.
"""

import ast
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from nnsight.intervention.source import STATE
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from nnterp.components import runs
from nnterp.components.definitions import CannotTap, calls
from nnterp.components.taps import served, tapped

SLOTS = "expert_outputs"

_copies: "weakref.WeakKeyDictionary[Callable, Any]" = weakref.WeakKeyDictionary()


def summed_slots(definition: ast.FunctionDef, name: str, natives: Mapping[str, str]) -> None:
    """The slots' outputs as they are about to be summed: ``slots.view(tokens, top_k, hidden).sum(dim=1)``."""
    for call in calls(definition, "sum"):
        held = getattr(call.func, "value", None)
        if isinstance(held, ast.Call) and getattr(held.func, "attr", None) == "view" and len(held.args) == 3:
            call.func.value = served(definition, name, held)
            return
    raise CannotTap(f"{definition.name} does not sum over slots it holds apart")


def slots_copy(function: Callable) -> Callable | str:
    """The copy of an experts function that serves each slot's output, or why there is none."""
    if function not in _copies:
        try:
            _copies[function] = tapped(function, {SLOTS: summed_slots}, {})
        except CannotTap as error:
            _copies[function] = str(error)
    return _copies[function]


def reason(experts: nn.Module) -> str | None:
    """Why ``experts`` does not keep each slot's output apart, or None."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if not hasattr(experts, "has_gate"):
        return "its experts do not call transformers' experts interface"
    function = ALL_EXPERTS_FUNCTIONS.get(implementation, None)
    if function is None or isinstance(slots_copy(function), str):
        return (
            f"the {implementation!r} experts never hold each slot's output: load the model with "
            f'experts_implementation="grouped_mm" or "batched_mm"'
        )
    return None


@cache
def serving_call(function: Callable) -> Callable:
    """An experts function, or its copy that serves where it has one, that refuses experts there are not."""
    copy = slots_copy(function)
    run = function if isinstance(copy, str) else copy

    def experts_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        for indices in (*args, *kwargs.values()):
            if not indices.is_floating_point():
                refuse_unknown(module, indices)
        return run(module, *args, **kwargs)

    return experts_forward


def spread() -> bool:
    """Whether several processes run the model together."""
    return distributed.is_available() and distributed.is_initialized()


def refuse_unknown(experts: nn.Module, indices: Tensor) -> None:
    """Raise ValueError for an expert there is not among ``indices``, where a trace has written to them in place.

    The functions do not look: grouped_mm returns memory that nothing was written to for it, batched_mm another expert.
    On a model whose experts are spread over processes one past the last is another process's.
    """
    if not indices._version or isinstance(indices, FakeTensor) or spread():
        return
    wrong = indices[(indices < 0) | (indices >= experts.num_experts)]
    if wrong.numel():
        raise ValueError(
            f"expert_indices of {experts.__dict__[STATE].active()[1]} were edited in place: there are experts 0 to "
            f"{experts.num_experts - 1}, and no expert {wrong[0].item()}"
        )


def serving_lookup(plain: Callable) -> Callable:
    """transformers' look-up of an experts function, answering with the same function, serving."""

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable:
        return serving_call(plain(self, *args, **kwargs))

    return get_interface


def serve_lookups() -> None:
    """Make every look-up of an experts function serve during runs."""
    from transformers.integrations.moe import ExpertsInterface

    runs.during_runs(ExpertsInterface, "get_interface", serving_lookup)


def gated_expert(tokens: Tensor, gate_up: Tensor, down: Tensor, activation: Callable) -> Tensor:
    """One expert on ``[tokens, hidden_size]``: ``down(activation(gate(x)) * up(x))``, gate and up in one matrix."""
    gate, up = F.linear(tokens, gate_up).chunk(2, dim=-1)
    return F.linear(activation(gate) * up, down)


def one_expert(experts: nn.Module, expert: int, tokens: Tensor) -> Tensor:
    """Expert ``expert`` of an experts module on ``[tokens, hidden_size]``, by transformers' conventions for its
    parameters.

    An up projection, fused with a gate where there is one, the gating or activation, a down projection; with biases,
    transposed or with a norm behind it as the module's flags say.
    """

    def linear(value: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)[expert]
        bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
        return F.linear(value, weight.T if experts.is_transposed else weight, bias)

    inner = linear(tokens, "gate_up_proj" if experts.has_gate else "up_proj")
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = linear(inner, "down_proj")
    # transformers 5.19.0 knows no norm behind an expert
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
