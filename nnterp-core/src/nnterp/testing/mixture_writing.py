"""A mixture's values edited, and its tokens routed, against the plain loop: what changes, and nothing else."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_differs, assert_same
from nnterp.testing.edits import noise
from nnterp.testing.mixture_facts import MixtureFacts
from nnterp.testing.oracles import greedy

#: The token that one-token edits are tried on: row 0, position 2.
ROW, TOKEN = 0, 2
STEPS = 3


def assert_only_token(changed: Tensor, clean: Tensor, ulps: float = 32) -> None:
    """``changed`` is ``clean`` at every token but (`ROW`, `TOKEN`), where it differs."""
    assert_differs(changed[ROW, TOKEN], clean[ROW, TOKEN])
    patched = changed.clone()
    patched[ROW, TOKEN] = clean[ROW, TOKEN]
    assert_close(patched, clean, ulps)


class MixtureWriting(MixtureFacts):
    def logits_with(self, part: str, edit: Any, in_place: bool = False) -> Tensor:
        moe = self.moe
        with self.model.trace(self.ids):
            if in_place:
                live = getattr(moe, part)
                live[:] = edit(live)
            else:
                setattr(moe, part, edit(getattr(moe, part)))
            logits = self.model.logits.save()
        return logits.detach()

    def test_every_value_edited(self) -> None:
        """Assigned, as the loop edits it; in place, the same."""
        for part in self.parts:
            edit = self.edit_of_part(part)
            expected = self.loop({part: edit}).output.logits.detach()
            logits = self.logits_with(part, edit)
            assert_differs(logits, self.loaded.clean_logits)
            assert_close(logits, expected, ULPS_AFTER_MODEL)
            with torch.no_grad():
                assert_same(self.logits_with(part, edit, in_place=True), logits)

    # -- weights and indices ------------------------------------------------------------------------------------------

    def test_zeroed_weight_removes_that_slot(self) -> None:
        clean = self.read_parts()

        def zero(moe: Any) -> None:
            moe.expert_weights[ROW, TOKEN, 0] = 0

        with torch.no_grad():
            routed = self.traced(zero)["routed_output"]
            expert = clean["expert_indices"][ROW, TOKEN, 0].item()
            out = self.moe.expert_output(expert, clean["mlp_input"][ROW, TOKEN])
        assert_only_token(routed, clean["routed_output"])
        removed = clean["routed_output"][ROW, TOKEN] - routed[ROW, TOKEN]
        self.assert_near(removed, out * clean["expert_weights"][ROW, TOKEN, 0], clean["routed_output"])

    def assert_near(self, actual: Tensor, expected: Tensor, scale: Tensor) -> None:
        """Equal up to 64 roundings of numbers as large as ``scale``."""
        allowed = 64 * torch.finfo(scale.dtype).eps * scale.abs().max()
        assert (actual - expected).abs().max() <= allowed
        assert expected.abs().max() > 100 * allowed

    def test_filled_weights_remove_one_expert(self) -> None:
        clean = self.read_parts()
        for expert in clean["expert_indices"].unique()[:2].tolist():

            def remove(moe: Any, expert: int = expert) -> None:
                chosen = moe.expert_indices == expert
                moe.expert_weights = moe.expert_weights.masked_fill(chosen, 0)

            slots = clean["expert_indices"] == expert
            with torch.no_grad():
                out = self.moe.expert_output(expert, clean["mlp_input"])
            weight = (clean["expert_weights"] * slots).sum(-1, keepdim=True)
            routed = self.traced(remove)["routed_output"]
            assert_close(routed, (clean["routed_output"] - out * weight).to(out.dtype), 64)
            without = ~slots.any(-1)
            if without.any():
                assert_close(routed[without], clean["routed_output"][without], 32)

    def test_rerouted_index_changes_that_token_alone(self) -> None:
        clean, moe = self.read_parts(), self.moe
        chosen = clean["expert_indices"][ROW, TOKEN].tolist()
        other = next(expert for expert in range(moe.num_experts) if expert not in chosen)

        def reroute(moe: Any) -> None:
            indices = moe.expert_indices.clone()
            indices[ROW, TOKEN, 0] = other
            moe.expert_indices = indices

        routed = self.traced(reroute)["routed_output"]
        assert_only_token(routed, clean["routed_output"])
        hidden, weight = clean["mlp_input"][ROW, TOKEN], self.slot_weights(clean)[ROW, TOKEN, 0]
        with torch.no_grad():
            out, old = (self.slot_output(partial(moe.expert_output, e), hidden, weight) for e in (other, chosen[0]))
        moved = routed[ROW, TOKEN] - clean["routed_output"][ROW, TOKEN]
        self.assert_near(moved, out - old, clean["routed_output"])

    # -- the router's logits ------------------------------------------------------------------------------------------

    def steer_router(self, moe: Any, expert: int) -> None:
        logits = moe.router_logits.clone()
        logits[ROW, TOKEN, expert] = logits.max() + 5
        moe.router_logits = logits

    def test_written_logits_change_the_routing(self) -> None:
        """The token's heaviest slot becomes the expert whose logit was raised; no other token is routed otherwise."""
        clean = self.read_parts()
        target = clean["router_logits"][ROW, TOKEN].argmin().item()
        written = self.read_parts(act=lambda moe: self.steer_router(moe, target))
        weights, indices = self.slot_weights(written), written["expert_indices"]
        assert indices[ROW, TOKEN, weights[ROW, TOKEN].argmax()] == target
        others = indices.clone()
        others[ROW, TOKEN] = clean["expert_indices"][ROW, TOKEN]
        assert_same(others, clean["expert_indices"])
        assert_only_token(written["routed_output"], clean["routed_output"])

    def test_banned_experts_get_no_token(self) -> None:
        clean = self.read_parts()
        favourite = clean["expert_indices"].flatten().mode().values.item()
        for banned in (favourite, [favourite]):
            read = self.read_parts(act=lambda moe, experts=banned: moe.ban_experts(experts))
            indices, weights = read["expert_indices"], self.slot_weights(read)
            assert not (indices == favourite).any()
            assert torch.isfinite(weights).all() and torch.isfinite(read["mlp_output"]).all()
            kept = ~(clean["expert_indices"] == favourite).any(-1)
            if kept.any() and not self.GROUPED:
                assert_same(indices[kept], clean["expert_indices"][kept])

    # -- routing by hand ----------------------------------------------------------------------------------------------

    def routes(self) -> list[tuple[Any, Any]]:
        """Every form of ``(indices, weights)``: one expert, one per slot, one per token and slot, and weights."""
        top_k, experts = self.moe.top_k, self.moe.num_experts
        shape = (*self.ids.shape, top_k)
        generator = torch.Generator().manual_seed(4)
        table = torch.randint(experts, shape, generator=generator)
        some = torch.rand(shape, generator=generator).to(self.read_parts()["expert_weights"].dtype)
        per_slot, halves = list(range(top_k)), [0.5] * top_k
        return [(1, None), (per_slot, None), (table, None), (table, some), (0, 0.5), (1, halves)]

    def check_route_to(self, model: Any) -> None:
        """Every form of `route_to` on ``model``."""
        shape, dtype = (*self.ids.shape, self.moe.top_k), self.slot_weights(self.read_parts()).dtype
        for indices, weights in self.routes():
            routed = torch.as_tensor(indices).expand(shape)
            edits = {"expert_indices": lambda _, new=routed: new.clone()}
            if weights is not None:
                forced = torch.as_tensor(weights, dtype=dtype).expand(shape)
                edits["expert_weights"] = lambda _, new=forced: new.clone()
            logits = self.traced(lambda moe, i=indices, w=weights: moe.route_to(i, weights=w), model)["logits"]
            assert_differs(logits, self.loaded.clean_logits)
            assert_close(logits, self.loop(edits).output.logits.detach(), ULPS_AFTER_MODEL)

    def test_route_to(self) -> None:
        self.check_route_to(self.model)

    # -- other ways of running ----------------------------------------------------------------------------------------

    def test_invokes_have_their_own_rows(self) -> None:
        """Read in both; then edited in the second alone, in place and assigned; then in both."""
        moe, first, second = self.moe, self.ids[:1], self.ids[1:]
        clean, logits = self.read_parts(), self.loaded.clean_logits
        for part in self.parts:
            edit = self.edit_of_part(part)
            with self.model.trace() as tracer:
                with tracer.invoke(first):
                    upper = getattr(moe, part).clone().save()
                with tracer.invoke(second):
                    lower = getattr(moe, part).clone().save()
            assert_same(torch.cat([upper, lower]).detach(), clean[part])

            expected = [self.loop({part: edit}, ids=ids).output.logits.detach() for ids in (first, second)]
            for in_place, both in ((True, False), (False, False), (False, True), (True, True)):
                with torch.no_grad(), self.model.trace() as tracer:
                    with tracer.invoke(first):
                        if both:
                            self.edit_live(moe, part, edit, in_place)
                        upper = self.model.logits.save()
                    with tracer.invoke(second):
                        self.edit_live(moe, part, edit, in_place)
                        lower = self.model.logits.save()
                assert_close(lower, expected[1], ULPS_AFTER_MODEL)
                assert_close(upper, expected[0] if both else logits[:1], ULPS_AFTER_MODEL)

    @staticmethod
    def edit_live(moe: Any, part: str, edit: Any, in_place: bool) -> None:
        live = getattr(moe, part)
        if in_place:
            live[:] = edit(live)
        else:
            setattr(moe, part, edit(live))

    def test_steps_of_generation(self) -> None:
        """Every step's values; and each value edited at the second step alone."""
        moe, arguments = self.moe, {**greedy(STEPS), "return_dict_in_generate": True, "output_logits": True}

        def call() -> Any:
            return self.bare.generate(**self.inputs(), **arguments)

        plain = self.loop(call=call)
        for part in self.parts:
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                read = [].save()
                for _ in tracer.iter[0:STEPS]:
                    read.append(getattr(moe, part).clone())
            assert len(read) == len(plain.calls[part]) == STEPS
            for got, expected in zip(read, plain.calls[part], strict=True):
                assert_close(got.double(), expected.double(), ULPS_AFTER_MODEL, precision=torch.float32)

            edit = self.edit_of_part(part)
            expected = self.loop({part: edit}, call=call, at_call=1).output
            with self.model.generate(self.ids, **greedy(STEPS)) as tracer:
                logits = [].save()
                for step in tracer.iter[0:STEPS]:
                    if step == 1:
                        setattr(moe, part, edit(getattr(moe, part)))
                    logits.append(self.model.logits[:, -1].clone())
                tokens = tracer.result.save()
            assert_same(tokens, expected.sequences)
            for got, bare in zip(logits, expected.logits, strict=True):
                assert_close(got, bare, ULPS_AFTER_MODEL)

    def test_gradients_of_the_mixture(self) -> None:
        weights = noise(self.loaded.clean_logits, seed=5)
        run = self.loop(graph=True)
        (run.output.logits * weights).sum().backward()
        for part in self.parts:
            if part == "expert_indices":
                continue
            moe = self.moe
            with self.model.trace(self.ids):
                live = getattr(moe, part)
                loss = (self.model.logits * weights).sum()
                with loss.backward():
                    gradient = live.grad.save()
            expected = run[part].grad
            if (part, self.moe.top_k) == ("router_logits", 1) and expected.abs().max() < 1e-6:
                assert gradient.abs().max() < 1e-6  # a lone weight, normalised, is one whatever the logits are
                continue
            assert gradient.any()
            assert_close(gradient, expected, ULPS_AFTER_MODEL)
