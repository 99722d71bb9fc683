"""A mixture of experts: its routing, what each expert contributes, and the shared expert."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nnterp.components import experts_interface
from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import unavailable
from nnterp.components.layouts import HIDDEN, Residual
from nnterp.components.locations import child, parsed
from nnterp.components.mlp import Mlp
from nnterp.components.module_sizes import module_int
from nnterp.components.standard import Standard
from nnterp.components.taps import assigned
from nnterp.components.tokens import TokenEProperty, rows

EXPERTS = "num_experts"
TOP_K = "top_k"

#: One score per expert and token, ``[batch, seq, num_experts]``.
RouterLogits = Float[Tensor, f"batch seq {EXPERTS}"]
#: One weight per routing slot, ``[batch, seq, top_k]``.
ExpertWeights = Float[Tensor, f"batch seq {TOP_K}"]
#: One expert per routing slot, ``[batch, seq, top_k]``, int64.
ExpertIndices = Int[Tensor, f"batch seq {TOP_K}"]
#: One contribution per routing slot, ``[batch, seq, top_k, hidden_size]``.
ExpertOutputs = Float[Tensor, f"batch seq {TOP_K} {HIDDEN}"]
#: How many tokens each expert got, ``[num_experts]``.
ExpertLoad = Int[Tensor, EXPERTS]

IN_EXPERTS = (
    "a mixture has no neurons of its own: they are inside its experts (expert_output gives one expert's output)"
)


class Router(Standard):
    """A mixture's router. It hosts the location of the mixture's ``router_logits``.

    A family whose router keeps its logits in another variable redefines ``TAPS``.
    """

    ROLE = "router"
    TAPS = {"router_logits": assigned("router_logits", 0)}


class BiasedRouter(Router):
    """A router whose bias takes part in choosing the experts and not in weighting them (DeepSeek-V3 and its kin)."""

    TAPS = {**Router.TAPS, "choice_scores": assigned("scores_for_choice", 0)}


class ExpertChoice(TokenEProperty):
    """Which experts tokens are routed to. An assignment of one that the host has not is refused.

    The experts do not look: some implementations return memory that nothing was written to, others another expert.
    """

    def check(self, obj: Any, value: Any, replaced: Any) -> None:
        super().check(obj, value, replaced)
        if isinstance(value, FakeTensor):
            return
        wrong = value[(value < 0) | (value >= obj.num_experts)]
        if wrong.numel():
            raise ValueError(_no_such_expert(obj, wrong[0].item()))


def _no_such_expert(host: Any, expert: Any) -> str:
    return f"{host.path} has experts 0 to {host.num_experts - 1}; there is no expert {expert!r}"


def _expert_load(moe: "Moe") -> ExpertLoad:
    """How many of this call's tokens each expert is routed, ``[num_experts]``, int64. Padding is counted as well."""
    return torch.bincount(moe.expert_indices.flatten(), minlength=moe.num_experts)[: moe.num_experts]


class Moe(Mlp):
    """A mixture of experts. ``mlp_output`` is what the block adds, as on any `Mlp`.

    Its standard children are ``router``, ``experts`` and ``shared_experts``; a family aliases its own names. The model
    holds these values with batch and sequence flattened; they are served as this invoke's ``[batch, seq, ...]`` and
    written back.

    Attributes:
        SCORING: What the logits mean: ``"softmax"`` (over all experts, then the top k), ``"topk_softmax"`` (over the
            top k), ``"sigmoid"``, or the family's own word.
        SHARED_EXPERTS: The path of the shared expert's module, where there is one.
        WEIGHTS, INDICES: Which argument of the experts module holds the weights and the indices, as (position,
            keyword).
    """

    SCORING = "softmax"
    SHARED_EXPERTS = "shared_experts"
    WEIGHTS: tuple[int, str] = (2, "top_k_weights")
    INDICES: tuple[int, str] = (1, "top_k_index")
    TAPS = {"rows": rows()}

    mlp_activation = unavailable(IN_EXPERTS)
    mlp_neurons = unavailable(IN_EXPERTS)

    def install(self) -> None:
        super().install()
        experts_interface.serve_lookups()

    # -- availability -----------------------------------------------------------------------------------------------

    def no_mixture(self) -> str | None:
        """Why this module runs no mixture of experts, or None."""
        return None

    def needs_slots(self) -> str | None:
        """Why the experts' outputs are not kept apart per routing slot, or None."""
        reason = self.no_mixture()
        experts = child(self, "experts")
        return reason or (None if experts is None else experts_interface.reason(experts._module))

    def no_shared_expert(self) -> str | None:
        """Why there is no shared expert, or None."""
        from_root, ups, names, name = parsed(self.SHARED_EXPERTS)
        host = self.root if from_root else self
        for _ in range(ups):
            host = host.parent
        for step in (*names, name):
            host = None if host is None else child(host, step)
        return self.no_mixture() or ("this mixture has no shared expert" if host is None else None)

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _size(self, *names: str) -> int:
        for host in (self, child(self, "router"), child(self, "experts")):
            found = None if host is None else module_int(host, *names)
            if found is not None:
                return found
        raise NotImplementedError(
            f"{self.path} ({type(self._module).__name__}) says none of {', '.join(names)}; the family has to define it"
        )

    @property
    def num_experts(self) -> int:
        """Routed experts, read off the module, its router or its experts."""
        return self._size("num_experts", "num_local_experts", "n_routed_experts")

    @property
    def top_k(self) -> int:
        """Experts each token is routed to."""
        return self._size("top_k", "num_experts_per_tok")

    @property
    def intermediate_size(self) -> int:
        """Width of one routed expert's hidden layer."""
        experts = child(self, "experts")
        found = (
            None
            if experts is None
            else module_int(experts, "intermediate_dim", "expert_dim", "intermediate_size", "ffn_hidden_size")
        )
        return super().intermediate_size if found is None else found

    # -- values -----------------------------------------------------------------------------------------------------

    @TokenEProperty(
        "router.router_logits", "The router's logits, before they are scored", unavailable=lambda moe: moe.no_mixture()
    )
    def router_logits(self, value: Tensor) -> RouterLogits:
        """The router's logits, ``[batch, seq, num_experts]``, before the scoring (`SCORING`) and any selection bias.

        The router goes on with what is written, so weights and indices follow an edit, in place or assigned.
        """
        return value

    @TokenEProperty(
        "experts.inputs",
        "The weight of each routing slot",
        unavailable=lambda moe: moe.no_mixture(),
        select=lambda moe: moe.WEIGHTS,
    )
    def expert_weights(self, value: Tensor) -> ExpertWeights:
        """What multiplies each slot's expert output, ``[batch, seq, top_k]``: normalised and scaled as the router does.

        Zero ``[b, t, j]`` to remove slot ``j`` of token ``t``. In-place edits and assignment reach the model.
        """
        return value

    @ExpertChoice(
        "experts.inputs",
        "The expert of each routing slot",
        unavailable=lambda moe: moe.no_mixture(),
        select=lambda moe: moe.INDICES,
    )
    def expert_indices(self, value: Tensor) -> ExpertIndices:
        """The expert of each slot, ``[batch, seq, top_k]``, int64.

        Write another to reroute the slot; it keeps the weight that the router gave the expert it chose. An expert there
        is not raises ValueError: assigned, at that line; written in place, when the experts run.
        """
        return value

    @TokenEProperty(
        "experts.expert_outputs",
        "Each slot's weighted expert output, before the slots are summed",
        unavailable=lambda moe: moe.needs_slots(),
    )
    def expert_outputs(self, value: Tensor) -> ExpertOutputs:
        """Each slot's expert output times its weight, ``[batch, seq, top_k, hidden_size]``; its sum over slots is
        routed_output.

        Inside transformers' ``grouped_mm`` (the default) and ``batched_mm`` experts; the eager loop never holds it.
        """
        return value

    @TokenEProperty("experts.output", "The sum of the routed experts", unavailable=lambda moe: moe.no_mixture())
    def routed_output(self, value: Tensor) -> Residual:
        """The routed experts' sum, ``[batch, seq, hidden_size]``. In-place edits and assignment reach the model."""
        return value

    @TokenEProperty(
        "shared_experts.output", "The shared expert's contribution", unavailable=lambda moe: moe.no_shared_expert()
    )
    def shared_expert_output(self, value: Tensor) -> Residual:
        """What the shared expert adds, ``[batch, seq, hidden_size]``: with routed_output, the mixture's output."""
        return value

    expert_load = DerivedEProperty(
        _expert_load,
        "How many tokens each expert got",
        unavailable=lambda moe: type(moe).expert_indices.reason(moe),
        instead="expert_indices",
    )

    # -- experts ----------------------------------------------------------------------------------------------------

    def _expert(self, expert: int) -> int:
        if isinstance(expert, bool) or not isinstance(expert, int):
            raise ValueError(f"{_no_such_expert(self, expert)}: give its number, an int")
        if not 0 <= expert < self.num_experts:
            raise ValueError(_no_such_expert(self, expert))
        return expert

    def expert_output(self, expert: int, hidden: Tensor) -> Tensor:
        """What expert ``expert`` alone makes of ``hidden``, ``[..., hidden_size]``, before any routing weight.

        ``hidden`` is a tensor such as ``mlp_input``. Computed from the expert's own parameters, in and outside a trace;
        times the slot's weight it is what the mixture adds for that expert. Raises ValueError for an expert there is
        not.
        """
        reason = self.no_mixture()
        if reason is not None:
            raise ValueError(f"{self.path} has no experts: {reason}")
        if not self.root.dispatched:
            self.root.dispatch()
        flat = hidden.reshape(-1, hidden.shape[-1])
        experts = child(self, "experts") or self
        return self._one_expert(experts._module, self._expert(expert), flat).view(hidden.shape)

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        """Expert ``expert`` of the module ``experts``, or of the mixture where it has none, on ``[tokens, hidden]``."""
        return experts_interface.one_expert(experts, expert, tokens)

    def route_to(self, indices: Tensor | list[int] | int, weights: Tensor | list[float] | float | None = None) -> None:
        """Route this call's tokens to ``indices``, inside a trace before the experts run.

        Effective whichever experts implementation runs, since it acts on what the experts receive.

        Args:
            indices: ``[batch, seq, top_k]`` int64; or the ``top_k`` experts of every token as a list; or one expert,
                which every slot of every token gets.
            weights: Of the same form, one per slot; the router's own where None.

        Raises ValueError for an expert there is not or another shape.
        """
        current = self.expert_indices
        self.expert_indices = self._per_slot(indices, current, "indices")
        if weights is not None:
            self.expert_weights = self._per_slot(weights, self.expert_weights, "weights")

    def _per_slot(self, given: Any, current: Tensor, what: str) -> Tensor:
        value = torch.as_tensor(given, device=current.device)
        if not isinstance(given, Tensor):
            if what == "indices" and value.dtype != torch.int64:
                raise ValueError(f"route_to on {self.path}: experts are whole numbers, and {given!r} was given")
            value = value.to(current.dtype)
        if value.dim() == 1 and value.shape[0] != current.shape[-1]:
            raise ValueError(
                f"route_to on {self.path}: {value.shape[0]} {what} for {current.shape[-1]} slots a token (top_k)"
            )
        return value.expand(current.shape).contiguous() if value.dim() < 2 else value

    def ban_experts(self, experts: list[int] | int) -> None:
        """Keep this call's tokens away from ``experts``, inside a trace before the router scores.

        Their logits become -inf, so the router chooses among the others, and its weights are of those. Raises
        ValueError for an expert there is not, or where fewer than ``top_k`` are left.
        """
        banned = self._banned(experts)
        logits = self.router_logits
        self.router_logits = logits.masked_fill(banned.to(logits.device), float("-inf"))

    def _banned(self, experts: list[int] | int) -> Tensor:
        """Which experts are banned, ``[num_experts]``, bool."""
        banned = [self._expert(expert) for expert in ([experts] if isinstance(experts, int) else experts)]
        left = self.num_experts - len(set(banned))
        if left < self.top_k:
            raise ValueError(
                f"ban_experts on {self.path} leaves {left} of {self.num_experts} experts, and every token takes "
                f"{self.top_k} (top_k)"
            )
        mask = torch.zeros(self.num_experts, dtype=torch.bool)
        mask[banned] = True
        return mask


class GatedSharedMoe(Moe):
    """A mixture that scales what its shared expert adds by a gate of its own, computed beside it (Qwen2-MoE's kin)."""

    TAPS = {**Moe.TAPS, "shared_expert_output": assigned("shared_expert_output", -1)}
    shared_expert_output = Moe.shared_expert_output.at("shared_expert_output")


class BiasedMoe(Moe):
    """A mixture whose experts are chosen by `choice_scores`: a bias added. Its router is a `BiasedRouter`."""

    SCORING = "sigmoid"

    @TokenEProperty(
        "router.choice_scores",
        "What the experts are chosen by: their scores and a bias",
        unavailable=lambda moe: moe.no_mixture(),
    )
    def choice_scores(self, value: Tensor) -> RouterLogits:
        """What each token's experts are chosen by, ``[batch, seq, num_experts]``: the scored logits plus a bias.

        Before any choice of groups. An edit changes the choice alone; the chosen experts' weights come from the logits.
        """
        return value

    def ban_experts(self, experts: list[int] | int) -> None:
        """Keep this call's tokens away from ``experts``, inside a trace before the router scores.

        Their logits and the scores that experts are chosen by become -inf. Where the groups a token is routed to hold
        too few other experts, a banned one fills the slot with weight zero. Raises ValueError as on any mixture, and
        where experts are not chosen by their scores.
        """
        self._banned(experts)
        reason = type(self).choice_scores.reason(self)
        if reason is not None:
            raise ValueError(
                f"ban_experts on {self.path}: {reason}; zero expert_weights where expert_indices is theirs, or route "
                f"their tokens elsewhere with route_to"
            )
        super().ban_experts(experts)
        scores = self.choice_scores
        self.choice_scores = scores.masked_fill(self._banned(experts).to(scores.device), float("-inf"))
