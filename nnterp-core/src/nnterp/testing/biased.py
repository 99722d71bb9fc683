"""`BiasedMixtureSuite`: a mixture whose experts are chosen by their scores and a bias, a `components.BiasedMoe`."""

from typing import Any

import torch
from torch import Tensor

from nnterp.testing.comparing import ULPS_AFTER_MODEL, assert_close, assert_same
from nnterp.testing.mixtures import MixtureSuite


class BiasedMixtureSuite(MixtureSuite):
    """`MixtureSuite`, and what holds of the choice. The checkpoint's biases are drawn, so that they matter."""

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        generator = torch.Generator().manual_seed(6)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))

    def scored(self, logits: Tensor) -> Tensor:
        """The scores of the router's logits."""
        return logits.sigmoid()

    def chosen(self, act: Any, names: tuple[str, ...] = ("scores", "weights", "indices")) -> dict[str, Tensor]:
        """The choice, what it was made by, and the logits of the model, where ``act`` is called on the mixture."""
        moe, values = self.moe, {"scores": "choice_scores", "weights": "expert_weights", "indices": "expert_indices"}
        with self.model.trace(self.ids):
            read = {}.save()
            act(moe)
            for name in names:
                read[name] = getattr(moe, values[name]).clone()
            read["output"] = self.model.logits
        return {name: value.detach() for name, value in read.items()}

    def logits_of_the_router(self) -> Tensor:
        with self.model.trace(self.ids):
            logits = self.moe.router_logits.clone().save()
        return logits.detach()

    def test_bias_is_in_the_choice(self) -> None:
        router = self.moe.router._module
        read = self.chosen(lambda moe: None)
        assert router.e_score_correction_bias.any()
        assert_close(read["scores"], self.scored(self.logits_of_the_router()) + router.e_score_correction_bias)
        if not self.GROUPED:
            best = read["scores"].topk(self.moe.top_k).indices
            assert_same(read["indices"].sort(-1).values, best.sort(-1).values)

    def test_written_choice_chooses_and_does_not_weight(self) -> None:
        """Every token takes the expert whose score was raised; edited in place, the same; the logits weight it."""
        clean = self.chosen(lambda moe: None)
        target = clean["indices"].flatten().bincount(minlength=self.moe.num_experts).argmin().item()

        def assign(moe: Any) -> None:
            scores = moe.choice_scores.clone()
            scores[..., target] = 10.0
            moe.choice_scores = scores

        def write(moe: Any) -> None:
            moe.choice_scores[..., target] = 10.0

        read = self.chosen(assign)
        slots = read["indices"] == target
        assert slots.any(-1).all()
        indices, weights = read["indices"], read["weights"]
        edits = {"expert_indices": lambda _: indices, "expert_weights": lambda _: weights}
        assert_close(read["output"], self.loop(edits).output.logits.detach(), ULPS_AFTER_MODEL)
        raw = self.scored(self.logits_of_the_router()).gather(-1, indices)
        scale = weights.sum(-1, keepdim=True) / raw.sum(-1, keepdim=True)
        assert_close(weights, raw * scale, 64)
        with torch.no_grad():
            assert_same(self.chosen(write)["output"], read["output"])

    def test_banned_experts_get_no_token(self) -> None:
        clean = self.chosen(lambda moe: None)
        favourite = clean["indices"].flatten().mode().values.item()
        for banned in (favourite, [favourite]):
            read = self.chosen(lambda moe, experts=banned: moe.ban_experts(experts), ("weights", "indices"))
            assert not (read["indices"] == favourite).any()
            assert torch.isfinite(read["weights"]).all() and torch.isfinite(read["output"]).all()
            kept = ~(clean["indices"] == favourite).any(-1)
            if kept.any() and not self.GROUPED:
                assert_same(read["indices"][kept].sort(-1).values, clean["indices"][kept].sort(-1).values)

    def test_a_banned_expert_is_not_chosen_for_its_bias(self) -> None:
        model = self.loaded.load()
        moe = model.layers[self.EDITED].mlp
        moe.router._module.e_score_correction_bias[3] = 10.0
        with model.trace(self.ids):
            chosen = moe.expert_indices.clone().save()
        assert (chosen == 3).any(-1).all()
        with model.trace(self.ids):
            moe.ban_experts(3)
            banned = moe.expert_indices.clone().save()
            output = model.logits.save()
        assert not (banned == 3).any()
        assert torch.isfinite(output).all()
