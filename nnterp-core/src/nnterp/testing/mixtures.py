"""`MixtureSuite`: what holds of every mixture of experts, beside what `FamilySuite` states."""

from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp import Unavailable
from nnterp.components import Moe
from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_same
from nnterp.testing.edits import moved
from nnterp.testing.mixture_facts import NOT_HERE, MixtureFacts
from nnterp.testing.mixture_writing import MixtureWriting
from nnterp.testing.oracles import Site, run
from nnterp.testing.suite import FamilySuite

#: Rounding between transformers' experts and the loop.
ULPS_OF_A_SUM = 32


class MixtureReading(MixtureFacts):
    """What a mixture serves, against torch hooks, a plain loop, and transformers' own account."""

    family: ModuleType

    # -- names --------------------------------------------------------------------------------------------------------

    def test_modules_of_the_mixture(self) -> None:
        for layer in self.mixtures():
            moe, bare = self.model.layers[layer].mlp, self.module(f"layers.{layer}.mlp")
            assert isinstance(moe, Moe)
            names = {"router": self.ROUTER, "experts": self.EXPERTS, "shared_experts": self.SHARED}
            for standard, native in names.items():
                if native is None:
                    with pytest.raises(AttributeError, match=standard):
                        getattr(moe, standard)
                else:
                    assert getattr(moe, standard)._module is getattr(moe._module, native)
            assert type(getattr(bare, self.ROUTER)).__name__ == type(moe.router._module).__name__

    def test_sizes_of_the_mixture(self) -> None:
        config = self.bare.config.get_text_config()
        for layer in self.mixtures():
            moe = self.model.layers[layer].mlp
            assert moe.num_experts == attrgetter(self.EXPERTS_KEY)(config)
            assert 1 <= moe.top_k == attrgetter(self.TOP_K_KEY)(config) <= moe.num_experts
            assert isinstance(moe.SCORING, str) and moe.SCORING
            assert moe.no_mixture() is None

    # -- values -------------------------------------------------------------------------------------------------------

    def test_every_value_is_the_bare_mixtures(self) -> None:
        """On every block, read alone and with the others, with its layout and sizes; reading changes nothing."""
        for layer in self.mixtures():
            expected, moe = self.loop(layer=layer), self.model.layers[layer].mlp
            sizes = {"hidden_size": self.model.hidden_size, "num_experts": moe.num_experts, "top_k": moe.top_k}
            sizes.update(zip(("batch", "seq"), self.ids.shape, strict=True))
            for part in self.parts:
                with self.model.trace(self.ids):
                    read = getattr(moe, part).clone().save()
                    logits = self.model.logits.save()
                value = getattr(type(moe), part)
                assert isinstance(read, value.layout), f"{part}: {tuple(read.shape)} {read.dtype}"
                assert read.shape == tuple(sizes.get(axis) or getattr(moe, axis) for axis in value.dims)
                assert_same(logits, self.loaded.clean_logits)
                if part == "expert_indices":
                    assert read.dtype == torch.int64
                    assert_same(read, expected[part])
                else:
                    assert_close(read, expected[part], ULPS_OF_A_SUM)
            assert_close(expected.output.logits.detach(), self.loaded.clean_logits, ULPS_AFTER_MODEL)
        together = self.read_parts()
        expected = self.loop()
        for part in self.parts:
            assert_close(together[part].double(), expected[part].double(), ULPS_OF_A_SUM, precision=torch.float32)

    def test_routing_is_a_choice_of_experts(self) -> None:
        read, moe = self.read_parts(), self.moe
        indices = read["expert_indices"]
        assert ((indices >= 0) & (indices < moe.num_experts)).all()
        ordered = indices.sort(-1).values
        assert (ordered[..., 1:] != ordered[..., :-1]).all(), "a token is routed to one expert twice"
        assert len(indices.unique()) > 1

    def test_router_logits_are_transformers(self) -> None:
        if not self.OUTPUTS_LOGITS:
            return
        returned = self.bare(**self.inputs(), output_router_logits=True).router_logits
        assert len(returned) == len(self.mixtures())
        for layer, expected in zip(self.mixtures(), returned, strict=True):
            with self.model.trace(self.ids):
                read = self.model.layers[layer].mlp.router_logits.clone().save()
            assert_same(read.detach().flatten(0, 1), expected.detach().reshape(-1, expected.shape[-1]))

    def test_routed_output_is_what_the_experts_return(self) -> None:
        mixture = self.module(f"layers.{self.EDITED}.mlp")
        sites = {"routed": self.routed_site(mixture)}
        recorded, read = run(self.bare, lambda: self.bare(**self.inputs()), sites), self.read_parts()
        assert_same(read["routed_output"], recorded["routed"].reshape(read["routed_output"].shape))
        total = self.mixture_sum(read["routed_output"], read.get("shared_expert_output"))
        assert_close(total, read["mlp_output"])
        if "shared_expert_output" in read:
            assert read["shared_expert_output"].any()

    def test_slots_add_up_to_the_routed_output(self) -> None:
        if "expert_outputs" in self.parts:
            read = self.read_parts()
            assert_close(self.in_the_stream(read["expert_outputs"].sum(2)), read["routed_output"], 16)

    # -- one expert ---------------------------------------------------------------------------------------------------

    def test_one_expert_is_what_the_mixture_adds_for_it(self) -> None:
        """On rows, on one token, in a trace and outside; the routed sum is those of the slots, weighted."""
        read, moe = self.read_parts(), self.moe
        hidden, weights, indices = read["mlp_input"], self.slot_weights(read), read["expert_indices"]
        with torch.no_grad():
            every = torch.stack([moe.expert_output(expert, hidden) for expert in range(moe.num_experts)], dim=2)
            for expert in range(moe.num_experts):
                assert_close(every[:, :, expert], self.expert(self.experts(), expert, hidden))
                assert_close(moe.expert_output(expert, hidden[0, 1]), every[0, 1, expert])
            slots = torch.zeros(*indices.shape, hidden.shape[-1], dtype=hidden.dtype)
            for expert in range(moe.num_experts):
                for slot in range(moe.top_k):
                    added = self.slot_output(partial(moe.expert_output, expert), hidden, weights[..., slot, None])
                    slots[:, :, slot] += added.where(indices[..., slot, None] == expert, 0).to(hidden.dtype)
        assert_close(slots.sum(2), read["routed_output"], ULPS_OF_A_SUM)
        if "expert_outputs" in read:
            assert_close(slots, self.in_the_stream(read["expert_outputs"]), ULPS_OF_A_SUM)
        block = self.model.layers[self.EDITED]
        with torch.no_grad(), self.model.trace(self.ids):
            inside = block.mlp.expert_output(0, block.mlp_input).save()
        assert_same(inside, every[:, :, 0])

    def test_expert_load_counts_the_tokens(self) -> None:
        moe = self.moe
        with self.model.trace(self.ids):
            load = moe.expert_load.save()
        expected = [(self.read_parts()["expert_indices"] == expert).sum().item() for expert in range(moe.num_experts)]
        assert load.tolist() == expected
        assert load.sum() == self.ids.numel() * moe.top_k
        with pytest.raises(AttributeError, match="expert_indices"), self.model.trace(self.ids):
            moe.expert_load = load
        with self.model.trace() as tracer:
            with tracer.invoke(self.ids[:1]):
                first = moe.expert_load.save()
            with tracer.invoke(self.ids[1:]):
                second = moe.expert_load.save()
        assert (first + second).tolist() == expected

    # -- experts implementations --------------------------------------------------------------------------------------

    def test_every_experts_implementation(self) -> None:
        """The same values under each; the eager loop holds no slots, which its values say."""
        if not self.IMPLEMENTATIONS:
            return
        expected, clean = self.read_parts(), self.loaded.clean_logits
        for implementation in ("batched_mm", "eager", "grouped_mm"):
            model = self.loaded.load(experts_implementation=implementation)
            moe = model.layers[self.EDITED].mlp
            reason = moe.support()["expert_outputs"]
            read = self.read_parts(model)
            assert set(expected) - set(read) <= {"expert_outputs"}
            for part, value in read.items():
                assert_close(value.double(), expected[part].double(), ULPS_OF_A_SUM, precision=clean.dtype)
            if implementation == "eager" and "expert_outputs" in self.parts:
                assert "experts_implementation" in reason
                with pytest.raises(Unavailable, match="experts_implementation"), model.trace(self.ids):
                    moe.expert_outputs.save()
            else:
                assert (reason is None) == ("expert_outputs" in self.parts)
            for part in self.parts:
                if part in read:
                    edit = self.edit_of_part(part)
                    with model.trace(self.ids):
                        setattr(moe, part, edit(getattr(moe, part)))
                        logits = model.logits.save()
                    assert_close(logits, self.loop({part: edit}).output.logits, ULPS_AFTER_MODEL)
            self.check_route_to(model)
            self.check_in_place_index(model, "no expert")
            with model.trace(self.ids):
                logits = model.logits.save()
            assert_close(logits, clean, ULPS_AFTER_MODEL)

    # -- dense blocks -------------------------------------------------------------------------------------------------

    def test_dense_block_is_an_mlp(self) -> None:
        for layer in self.layers_of("mlp.mlp_output", self.DENSE):
            mlp = self.model.layers[layer].mlp
            assert not isinstance(mlp, Moe)
            for part in self.PARTS:
                assert NOT_HERE in self.model.support(layer=layer)[f"mlp.{part}"]
            for name, site in (("mlp_activation", Site("mlp.act_fn")), ("mlp_neurons", Site("mlp.down_proj", "input"))):
                module = self.module(f"layers.{layer}.{site.module}")
                recorded = run(self.bare, lambda: self.bare(**self.inputs()), {"x": (module, site)})
                edited = run(
                    self.bare, lambda: self.bare(**self.inputs()), {"x": (module, site)}, {"x": moved}
                ).output.logits
                with self.model.trace(self.ids):
                    read = getattr(mlp, name).clone().save()
                    setattr(mlp, name, moved(read))
                    logits = self.model.logits.save()
                assert_same(read, recorded["x"])
                assert_close(logits, edited, ULPS_AFTER_MODEL)

    def check_in_place_index(self, model: Any, words: str | None = None) -> None:
        """An expert there is not, written in place, is refused where the experts run, whatever runs them."""
        moe = model.layers[self.EDITED].mlp
        for wrong in (moe.num_experts, -1):
            with pytest.raises((ValueError, IndexError, RuntimeError), match=words), model.trace(self.ids):
                moe.expert_indices[:, -1] = wrong

    # -- bad input ----------------------------------------------------------------------------------------------------

    def test_bad_input(self) -> None:
        """Each is refused in words that name it, and the model works afterwards."""
        moe, top_k = self.moe, self.moe.top_k
        experts, hidden = moe.num_experts, torch.zeros(1, 2, self.model.hidden_size)
        for wrong in (experts, -1, True, 1.0):
            with pytest.raises(ValueError, match="no expert"):
                moe.expert_output(wrong, hidden)
        with pytest.raises(ValueError, match="an int"):
            moe.expert_output(torch.tensor(0), hidden)
        shape = (*self.ids.shape, top_k)
        refused = [
            (lambda: moe.route_to(experts), "no expert"),
            (lambda: moe.route_to([0] * (top_k + 1)), "top_k"),
            (lambda: moe.route_to(torch.zeros(*self.ids.shape, top_k + 1, dtype=torch.long)), "expert_indices"),
            (lambda: moe.route_to([0.5] * top_k), "whole numbers"),
            (lambda: moe.route_to(torch.full(shape, experts)), "no expert"),
            (lambda: moe.route_to(torch.zeros(shape)), "int64"),
            (lambda: setattr(moe, "expert_indices", torch.full(shape, experts)), "no expert"),
            (lambda: setattr(moe, "expert_indices", torch.full(shape, -1)), "no expert"),
            (lambda: moe.ban_experts(experts), "no expert"),
            (lambda: moe.ban_experts([0, -1]), "no expert"),
            (lambda: moe.ban_experts(list(range(experts - top_k + 1))), "top_k"),
        ]
        if "expert_weights" in self.parts:
            refused += [
                (lambda: moe.route_to(list(range(top_k)), weights=[0.5] * (top_k + 1)), "top_k"),
                (lambda: moe.route_to(list(range(top_k)), weights=torch.ones(1, 1, 1, 1)), "expert_weights"),
                (lambda: setattr(moe, "expert_weights", torch.ones(1, 1, top_k)), "nothing is broadcast"),
            ]
        for act, words in refused:
            with pytest.raises(ValueError, match=words), self.model.trace(self.ids):
                act()
        self.check_in_place_index(self.model)
        for layer in self.layers_of("mlp.mlp_output", self.DENSE):
            dense = self.model.layers[layer].mlp
            with pytest.raises(AttributeError, match="route_to"), self.model.trace(self.ids):
                dense.route_to(0)
            with pytest.raises(AttributeError, match="router_logits"), self.model.trace(self.ids):
                dense.router_logits.save()
        with self.model.trace(self.ids):
            logits: Tensor = self.model.logits.save()
        assert_same(logits, self.loaded.clean_logits)


class MixtureSuite(MixtureReading, MixtureWriting, FamilySuite):
    """Subclass it, state the family's facts (`nnterp.testing.mixture_facts.MixtureFacts` as well), as `FamilySuite`."""
