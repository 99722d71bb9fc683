"""What a mixture of the bare model computes, written out: its router's projection, its slots one expert at a time.

No module of transformers holds one expert's output, so while a `Loop` records, the experts module runs a plain loop
over the slots in place of transformers' implementation, as `oracles.Formula` stands for an attention function.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnterp.testing.oracles import Edit, Run, Site, hooked

#: The mixture's values, in the order in which most families compute them.
PARTS = (
    "router_logits",
    "expert_weights",
    "expert_indices",
    "expert_outputs",
    "routed_output",
    "shared_expert_output",
)


class Loop:
    """One mixture of the bare model; `run` calls the model with its values recorded and edited.

    Every value is recorded, and handed to its edit, as ``[batch, seq, ...]``.

    Args:
        mixture, router, experts: The bare modules.
        expert: ``expert(experts, e, tokens)``, expert ``e`` of the module on ``[tokens, hidden]``, from its parameters.
        shared: The bare module and the `Site` of the shared expert's contribution, None where there is none.
    """

    def __init__(
        self,
        mixture: nn.Module,
        router: nn.Module,
        experts: nn.Module,
        expert: Callable[[nn.Module, int, Tensor], Tensor],
        shared: tuple[nn.Module, Site] | None = None,
    ) -> None:
        self.mixture, self.router, self.experts = mixture, router, experts
        self.expert, self.shared = expert, shared

    def run(
        self,
        model: nn.Module,
        call: Callable[[], Any],
        edits: Mapping[str, Edit] | None = None,
        at_call: int | None = None,
        graph: bool = False,
    ) -> Run:
        """``call`` with the parts recorded, and edited by ``edits`` (at the ``at_call``-th call only, if given)."""
        calls: dict[str, list[Tensor]] = {}

        def at(part: str, flat: Tensor) -> Tensor:
            shape = flat.shape
            value = flat.reshape(*self.rows, *(shape[-1:] if part == "shared_expert_output" else shape[1:]))
            seen = calls.setdefault(part, [])
            if part in (edits or {}) and at_call in (None, len(seen)):
                value = edits[part](value.clone())
            if graph and value.requires_grad:
                value.retain_grad()
            seen.append(value if graph else value.detach().clone())
            return value.reshape(shape)

        with self.routing(at), self.looping(at), self.sharing(model, at):
            output = call()
        return Run(output, calls)

    @contextmanager
    def routing(self, at: Callable) -> Iterator[None]:
        """The first linear map inside the router gives its logits."""
        plain = F.linear

        def linear(*args: Any, **kwargs: Any) -> Tensor:
            F.linear = plain
            return at("router_logits", plain(*args, **kwargs))

        def laid_out(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.rows = (*args, *kwargs.values())[0].shape[:2]

        def before(module: nn.Module, args: tuple) -> None:
            F.linear = linear

        handles = (
            self.mixture.register_forward_pre_hook(laid_out, with_kwargs=True),
            self.router.register_forward_pre_hook(before),
        )
        try:
            yield
        finally:
            F.linear = plain
            for handle in handles:
                handle.remove()

    @contextmanager
    def looping(self, at: Callable) -> Iterator[None]:
        """The experts run one after the other, each slot's output apart."""

        def forward(hidden: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
            indices, weights = (*routing, *named.values())
            shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
            indices, weights = at("expert_indices", indices), at("expert_weights", weights)
            slots = at("expert_outputs", self.slots(hidden, indices, weights))
            return at("routed_output", slots.sum(1)).reshape(shape)

        self.experts.forward = forward
        try:
            yield
        finally:
            del self.experts.forward

    def slots(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Each slot's weighted expert output, ``[tokens, top_k, hidden]``, one expert after the other."""
        slots = hidden.new_zeros(*indices.shape, hidden.shape[-1])
        for expert in indices.unique().tolist():
            token, slot = torch.where(indices == expert)
            out = self.expert(self.experts, expert, hidden[token]) * weights[token, slot, None]
            slots = slots.index_put((token, slot), out.to(slots.dtype))
        return slots

    @contextmanager
    def sharing(self, model: nn.Module, at: Callable) -> Iterator[None]:
        """The shared expert's contribution, at its site."""
        if self.shared is None:
            yield
            return
        with hooked(model, *self.shared, "shared_expert_output", Recorder(at)):
            yield


class WrittenOut(Loop):
    """A `Loop` whose mixture's whole forward is written out, for one that hands its experts no indices and weights."""

    def forward(self, at: Callable[[str, Tensor], Tensor], hidden: Tensor) -> Any:
        """What the mixture returns for ``[batch, seq, hidden]``, every value but the shared expert's handed to
        ``at(part, flat)``.
        """
        raise NotImplementedError

    @contextmanager
    def routing(self, at: Callable) -> Iterator[None]:
        """The router's values are the forward's."""
        yield

    @contextmanager
    def looping(self, at: Callable) -> Iterator[None]:
        """The forward stands in for the mixture's."""

        def forward(hidden: Tensor) -> Any:
            self.rows = hidden.shape[:2]
            return self.forward(at, hidden)

        self.mixture.forward = forward
        try:
            yield
        finally:
            del self.mixture.forward


class Recorder:
    """What `oracles.hooked` needs of a recorder."""

    graph = True  # the value goes on as it is recorded

    def __init__(self, at: Callable) -> None:
        self.at = at

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return self.at(name, value)


def gated_expert(experts: nn.Module, expert: int, tokens: Tensor) -> Tensor:
    """Expert ``expert`` on ``[tokens, hidden]``: gate and up in one parameter, one after the other, without biases."""
    gate, up = (tokens @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
    return (experts.act_fn(gate) * up) @ experts.down_proj[expert].T


def interleaved_expert(experts: nn.Module, expert: int, tokens: Tensor) -> Tensor:
    """Expert ``expert`` on ``[tokens, hidden]``: gate and up interleaved, both clamped, with biases (GPT-OSS)."""
    both = tokens @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[..., 0::2].clamp(max=experts.limit), both[..., 1::2].clamp(-experts.limit, experts.limit)
    inner = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    return inner @ experts.down_proj[expert] + experts.down_proj_bias[expert]
