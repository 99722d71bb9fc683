"""What a suite states about its mixture, and how the bare model's is run."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from nnterp import components
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close
from nnterp.testing.edits import noise
from nnterp.testing.facts import Facts
from nnterp.testing.mixture_oracles import PARTS, Loop, gated_expert
from nnterp.testing.oracles import Edit, Run, Site

NOT_HERE = "value on this block's mlp"


class MixtureFacts(Facts):
    """The facts of a family with a mixture; a layout can replace each.

    Attributes:
        DENSE: The blocks that run an ordinary MLP.
        ROUTER: Native name of the router in the mixture.
        EXPERTS: Native name of the experts in the mixture, None where they are in no module of their own.
        SHARED: Native name of the shared expert in the mixture, None where there is none.
        EXPERT_WIDTH_KEY: The config key of one expert's width.
        EXPERTS_KEY, TOP_K_KEY: The config keys of how many experts there are, and how many a token gets.
        GROUPED: Whether experts are chosen by groups, so that a token's experts depend on the scores of those it is not
            routed to.
        IMPLEMENTATIONS: Whether transformers has several implementations of the experts to choose from.
        OUTPUTS_LOGITS: Whether transformers returns the router's logits on ``output_router_logits=True``.
        PARTS: The mixture's values, with those that this family alone has.
        LOOP: The mixture written out (`mixture_oracles.Loop`).
    """

    EXPECTED_UNAVAILABLE = {
        "mlp.mlp_activation": "inside its experts",
        "mlp.mlp_neurons": "inside its experts",
        "mlp.shared_expert_output": "no shared expert",
    }
    DENSE: tuple[int, ...] = ()
    ROUTER: str = "gate"
    EXPERTS: str | None = "experts"
    SHARED: str | None = None
    EXPERT_WIDTH_KEY: str = "moe_intermediate_size"
    EXPERTS_KEY: str = "num_local_experts"
    TOP_K_KEY: str = "num_experts_per_tok"
    GROUPED: bool = False
    IMPLEMENTATIONS: bool = True
    OUTPUTS_LOGITS: bool = True
    PARTS: tuple[str, ...] = PARTS
    LOOP: type[Loop] = Loop

    # -- what FamilySuite asks ----------------------------------------------------------------------------------------

    def mixtures(self) -> list[int]:
        return [layer for layer in self.blocks if layer not in self.DENSE]

    def kind(self, host: str, layer: int) -> type | None:
        if host == "mlp":
            return self.family.Mlp if layer in self.DENSE else self.family.Moe
        return super().kind(host, layer)

    def expected_reason(self, value: str, layer: int) -> str | None:
        host, _, name = value.rpartition(".")
        if host != "mlp" or layer not in self.DENSE:
            return super().expected_reason(value, layer)
        return None if name in self.family.Mlp.values() else NOT_HERE

    def mlp_width(self, layer: int) -> int:
        if layer in self.DENSE:
            return super().mlp_width(layer)
        return attrgetter(self.EXPERT_WIDTH_KEY)(self.bare.config.get_text_config())

    def assert_untouched(self, actual: Tensor, clean: Tensor) -> None:
        """Up to rounding: experts run on all their tokens at once, and how a product rounds is a matter of how many."""
        assert_close(actual, clean, ULPS_AFTER_MODEL)

    def scanned(self) -> Any:
        """torch gives no shape for a grouped product of float32 matrices, so not the default experts."""
        return self.loaded.load(experts_implementation="batched_mm") if self.IMPLEMENTATIONS else self.model

    # -- the bare mixture ---------------------------------------------------------------------------------------------

    def expert(self, experts: nn.Module, expert: int, tokens: Tensor) -> Tensor:
        """Expert ``expert`` of the bare module on ``[tokens, hidden]``, from its parameters."""
        return gated_expert(experts, expert, tokens)

    def experts(self, layer: int | None = None, bare: nn.Module | None = None) -> nn.Module:
        """The bare module that holds the experts of a block, `EDITED` by default."""
        mixture = self.module(f"layers.{self.EDITED if layer is None else layer}.mlp", bare)
        return mixture if self.EXPERTS is None else getattr(mixture, self.EXPERTS)

    def slot_weights(self, read: Mapping[str, Tensor]) -> Tensor:
        """The weight of each slot, ``[batch, seq, top_k]``, among the values read of a mixture."""
        return read["expert_weights"]

    def slot_output(self, expert: Callable[[Tensor], Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
        """What a slot adds: its expert of ``hidden``, by its weight."""
        return expert(hidden) * weight

    def in_the_stream(self, slots: Tensor) -> Tensor:
        """What slots' outputs, or their sum, add to the stream: themselves, unless experts work in another space."""
        return slots

    def routed_site(self, mixture: nn.Module) -> tuple[nn.Module, Site]:
        """The bare module and the site of the routed experts' sum."""
        return mixture.experts, Site("")

    def mixture_sum(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """``mlp_output`` in terms of the mixture's two contributions."""
        return routed if shared is None else routed + shared

    def shared_site(self, mixture: nn.Module) -> tuple[nn.Module, Site] | None:
        """The bare module and the site of what the shared expert adds."""
        return None if self.SHARED is None else (getattr(mixture, self.SHARED), Site(""))

    def written_out(self, layer: int | None = None, bare: nn.Module | None = None) -> Loop:
        """The bare mixture of a block, `EDITED` by default."""
        mixture = self.module(f"layers.{self.EDITED if layer is None else layer}.mlp", bare)
        router, experts = getattr(mixture, self.ROUTER), self.experts(layer, bare)
        return self.LOOP(mixture, router, experts, self.expert, self.shared_site(mixture))

    def loop(
        self,
        edits: Mapping[str, Edit] | None = None,
        layer: int | None = None,
        call: Callable[[], Any] | None = None,
        ids: Tensor | None = None,
        **options: Any,
    ) -> Run:
        """A run of the bare model with the mixture of one block recorded and edited."""
        call = call or (lambda: self.bare(**self.inputs(ids)))
        return self.written_out(layer).run(self.bare, call, edits, **options)

    # -- through nnterp -----------------------------------------------------------------------------------------------

    @property
    def moe(self) -> components.Moe:
        """The mixture of the block that edits are tried on."""
        return self.model.layers[self.EDITED].mlp

    @property
    def parts(self) -> list[str]:
        """The mixture's values that this layout serves, in forward order."""
        served = [part for part in self.PARTS if self.has(self.layout_name, f"mlp.{part}")]
        return sorted(served, key=lambda part: self.model.rank(f"mlp.{part}", self.EDITED))

    def read_parts(
        self, model: Any = None, ids: Tensor | None = None, act: Callable[[components.Moe], None] = lambda moe: None
    ) -> dict[str, Tensor]:
        """The mixture's values, ``mlp_input`` and ``mlp_output``, in one trace that calls ``act`` on it."""
        model = self.model if model is None else model
        block = model.layers[self.EDITED]
        parts = [part for part in self.parts if block.mlp.support()[part] is None]
        with model.trace(self.ids if ids is None else ids):
            read = {}.save()
            read["mlp_input"] = block.mlp_input.clone()
            act(block.mlp)
            for part in parts:
                read[part] = getattr(block.mlp, part).clone()
            read["mlp_output"] = block.mlp.mlp_output.clone()
        return {name: value.detach() for name, value in read.items()}

    def traced(self, act: Callable[[components.Moe], None], model: Any = None) -> dict[str, Tensor]:
        """The logits, the mixture's routing and its sum in a trace in which ``act`` is called on the mixture."""
        model = self.model if model is None else model
        moe = model.layers[self.EDITED].mlp
        with model.trace(self.ids):
            act(moe)
            routed = moe.routed_output.clone().save()
            logits = model.logits.save()
        return {"routed_output": routed.detach(), "logits": logits.detach()}

    def edit_of_part(self, part: str) -> Edit:
        """The edit to try on a value of the mixture: of the indices, each slot's next expert."""
        if part == "expert_indices":
            experts = self.moe.num_experts
            return lambda value: (value + 1) % experts
        return lambda value: 0.5 * value + 0.5 * noise(value)
