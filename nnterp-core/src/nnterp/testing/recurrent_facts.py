"""What a suite states about its recurrent mixer, and which of its blocks have what."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnterp
from nnterp.testing import oracles
from nnterp.testing.block_kinds import BlockKinds
from nnterp.testing.oracles import Edit, Run, Site, Within
from nnterp.testing.recurrent_oracles import ENTERING, AtKernels, Recurrence

#: The mixer's values that are read and edited like any other value: a tensor at every call, whose edit changes it.
PLAIN = (*ENTERING, "attention_head_outputs", "attention_output")


class RecurrentFacts(BlockKinds):
    """The facts of a family with a recurrent mixer, beside those of `BlockKinds`; a layout can replace each.

    Attributes:
        RECURRENCE: The kind of recurrence (`nnterp.testing.recurrences`): ``DeltaRule()``, ``Scan()``,
            ``ScalarDecay()``, or a `Recurrence` of the family's own.
        MIXER: The standard path of the mixer in its block.
        MIXER_WIDTH_KEYS: The config key of each size of the mixer.
        CONVOLUTION: What the convolutions of the tiny checkpoint are multiplied by.
        A_LOG: The first and the last head's ``A_log`` in it, where transformers' leave no state behind for a token.
        LIMITED: Whether a prompt's step sizes are limited and a decode step's, in transformers, are not.
        HIDDEN_STATES_OF_BLOCKS: Whether transformers' hidden states begin behind the first block, and not before it.
    """

    RECURRENCE: Recurrence
    MIXER: str = "linear_attn"
    MIXER_WIDTH_KEYS: dict[str, str] = {}
    CONVOLUTION: float = 5
    A_LOG: tuple[float, float] | None = None
    LIMITED: bool = False
    HIDDEN_STATES_OF_BLOCKS: bool = False

    # -- what FamilySuite asks ----------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def recurrence_of_the_layout(self, layout: str) -> None:
        """What the recurrence says of the block written out, and of values that are views."""
        self.BLOCK = self.BLOCK or AtKernels(self.RECURRENCE)
        refused = [f"{self.MIXER}.{name}" for name in self.RECURRENCE.REFUSES_IN_PLACE]
        self.REFUSES_IN_PLACE = (*self.REFUSES_IN_PLACE, *refused)

    def prepare(self, model: nn.Module) -> None:
        """Convolutions as strong as a trained one's: weak, they leave a state so small that nothing after shows it."""
        super().prepare(model)
        for name, parameter in model.named_parameters():
            if "conv1d.weight" in name:
                parameter.data.mul_(self.CONVOLUTION)
            if name.endswith(".A_log") and self.A_LOG is not None:
                parameter.data = torch.linspace(*self.A_LOG, len(parameter))

    @classmethod
    def roles(cls) -> dict[str, str]:
        return {**super().roles(), cls.MIXER: cls.RECURRENCE.COMPONENT}

    @classmethod
    def all_values(cls) -> list[str]:
        without = (*cls.RECURRENCE.READ_ONLY, *cls.RECURRENCE.UNAVAILABLE)
        served = [name for name in PLAIN if name not in without]
        values = [value.rpartition(".") for value in super().all_values()]
        return [host + dot + name for host, dot, name in values if host != cls.MIXER or name in served]

    def expected_reason(self, value: str, layer: int) -> str | None:
        host, _, name = value.rpartition(".")
        if self.on(value, layer) and host == self.MIXER and name in self.RECURRENCE.UNAVAILABLE:
            return self.RECURRENCE.UNAVAILABLE[name]
        return super().expected_reason(value, layer)

    def where(self, value: str) -> Site | Any:
        host, _, name = value.rpartition(".")
        if host != self.MIXER or value in self.SITES:
            return super().where(value)
        return Site(host) if name == "attention_output" else Within(name)

    def hidden_states(self, output: Any) -> tuple[Tensor, ...]:
        before = (self.module("embed_tokens")(self.ids),) if self.HIDDEN_STATES_OF_BLOCKS else ()
        return (*before, *output.hidden_states)

    def oracle(self, values: Any, layers: Any = None, edits: Any = None, **options: Any) -> Run:
        if options.get("graph"):  # a value that the kernel is not given gets a gradient as one that is edited
            beside = [v for v in values if v.rpartition(".")[::2] in {(self.MIXER, n) for n in self.RECURRENCE.BESIDE}]
            edits = {**{(value, i): Tensor.clone for value in beside for i in layers}, **(edits or {})}
        return super().oracle(values, layers, edits, **options)

    def contributions(self) -> list[str]:
        found = [f"{self.MIXER}.attention_output", *super().contributions()]
        return [value for value in found if self.has(self.layout_name, value)]

    def all_mixers(self) -> list[str]:
        return [*super().all_mixers(), self.MIXER]

    # -- the mixers ---------------------------------------------------------------------------------------------------

    @property
    def recurrent(self) -> list[int]:
        """The blocks with a recurrent mixer."""
        return self.layers_of(f"{self.MIXER}.attention_output", self.blocks)

    @property
    def mixed(self) -> int:
        """The block that edits of the mixer's values are tried on."""
        return self.block_of(f"{self.MIXER}.attention_output")

    def mixer(self, layer: int | None = None, model: Any = None) -> Any:
        """The envoy of the mixer of a block, `mixed` by default."""
        model = self.model if model is None else model
        return self.envoy(model.layers[self.mixed if layer is None else layer], self.MIXER)

    def bare_mixer(self, layer: int | None = None, bare: Any = None) -> nn.Module:
        """The bare mixer of a block, `mixed` by default."""
        return self.module(f"layers.{self.mixed if layer is None else layer}.{self.MIXER}", bare)

    def entering(self, layer: int | None = None) -> list[str]:
        """What the kernel of a mixer computes from, of the values that it serves."""
        support = self.mixer(layer).support()
        return [name for name in ENTERING if support.get(name, "no such value") is None]

    @contextmanager
    def states_held(self, model: Any = None) -> Iterator[Any]:
        """Have `states` served: by the kernels that hold the state after each token."""
        model = self.model if model is None else model
        reasons = self.RECURRENCE.UNAVAILABLE
        by_chunks = "chunk_per_token" in reasons.get("states", "")
        if not by_chunks:
            nnterp.route_kernels(self.family, "torch")
        else:
            nnterp.chunk_per_token(model)
        try:
            yield model
        finally:
            if not by_chunks:
                nnterp.route_kernels(self.family, "default")
            else:
                nnterp.chunk_per_token(model, enabled=False)

    def recurrence_of(self, values: Mapping[str, Any], layer: int) -> tuple[Tensor, Tensor]:
        """``(states, head outputs)`` in float64 of a mixer's served values (``initial``: its `state_input`)."""
        return self.RECURRENCE.run(dict(values), self.RECURRENCE.parameters(self.bare_mixer(layer)))

    # -- the bare model -----------------------------------------------------------------------------------------------

    def cache_name(self) -> str:
        """The keyword by which the model is handed a cache."""
        names = signature(self.bare.forward).parameters
        return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)

    def cache_of(self, output: Any) -> Any:
        """The cache that a model returned."""
        return next(output[name] for name in ("cache", "past_key_values", "cache_params") if name in output)

    def state_of(self, cache: Any, layer: int) -> Tensor:
        """The recurrent state of a block in transformers' cache, key side first; a copy."""
        return self.RECURRENCE.cached(cache.layers[layer].recurrent_states[0]).clone()

    def continued(self, cache: Any, ids: Tensor, before: int) -> dict[str, Any]:
        """What the model is called with for ``ids`` that go on from ``cache``, which holds ``before`` tokens."""
        given = {"input_ids": ids, self.cache_name(): cache, "use_cache": True}
        if any(self.on(host, layer) for host in self.ATTENTIONS for layer in self.blocks):
            given["attention_mask"] = ids.new_ones(ids.shape[0], before + ids.shape[1])
        return given

    def kernels(
        self,
        parts: tuple[str, ...] = (),
        edits: Mapping[str, Edit] | None = None,
        call: Callable[[], Any] | None = None,
        written_out: bool = False,
        layer: int | None = None,
        **options: Any,
    ) -> Run:
        """A run of the bare model with ``parts`` of one mixer recorded, and edited, by their names.

        ``written_out`` for ``state``, which is recorded and edited once a token.
        """
        block = self.module(f"layers.{self.mixed if layer is None else layer}")
        sites = {part: (block, Within(part)) for part in (*(edits or {}), *parts)}
        call = call or (lambda: self.bare(**self.inputs()))
        at = AtKernels(self.RECURRENCE, written_out)
        return oracles.run(self.bare, call, sites, edits, block=at, **options)
