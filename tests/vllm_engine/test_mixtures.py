"""Mixtures: the gate is a module, whose logits decide where tokens go; what follows is one kernel."""

import pytest
import torch
from torch import nn

from nnterp.testing.comparing import assert_differs, assert_same
from nnterp.testing.edits import moved
from nnterp_vllm.testing import EngineSuite, assert_near

IN_KERNEL = dict.fromkeys(
    [f"mlp.{part}" for part in ("expert_weights", "expert_indices", "expert_outputs", "expert_load")]
    + ["mlp.shared_expert_output"],
    "one",
)


class Mixture(EngineSuite):
    """A mixture in every block."""

    EXPECTED_UNAVAILABLE = {
        "mlp.mlp_activation": "inside its experts",
        "mlp.mlp_neurons": "inside its experts",
        **IN_KERNEL,
    }

    @classmethod
    def roles(cls):
        return {**super().roles(), "mlp": "Moe"}

    def bare_routed(self, edit) -> tuple[torch.Tensor, torch.Tensor]:
        """What the bare router of block `EDITED` gives before ``edit``, and the model's logits with it."""
        router, found = self.module(f"layers.{self.EDITED}.mlp.gate"), []
        top_k = self.bare.config.num_experts_per_tok

        def forward(hidden):
            found.append(nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight))
            logits = edit(found[0])
            weights, indices = logits.softmax(-1).topk(top_k)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        router.forward = forward
        try:
            output = self.bare_logits()[-1]
        finally:
            del router.forward
        return found[0].detach(), output

    def test_router_logits(self):
        """They are transformers', and an edit of them routes as the same edit does there."""
        (clean,) = [self.read("mlp.router_logits")[self.EDITED]]
        theirs, output = self.bare_routed(lambda logits: logits)
        assert_near(clean[0], theirs)
        assert_near(self.clean, output)
        new = moved(clean)
        _, expected = self.bare_routed(lambda logits: new[0])
        assert_differs(expected, self.clean)
        assigned = self._written("mlp.router_logits", new)
        assert_near(assigned, expected)
        assert_same(self._written("mlp.router_logits", new, in_place=True), assigned)

    def test_banned_experts(self):
        model, prompt, at = self.model, self.prompt, self.EDITED
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            model.layers[at].mlp.ban_experts([0, 2])
            logits = model.logits.save()
        banned = torch.tensor([True, False, True, False, False])
        _, expected = self.bare_routed(lambda scores: scores.masked_fill(banned, float("-inf")))
        assert_differs(expected, self.clean)
        assert_near(logits[0, -1], expected)

    def test_experts_are_not_handed_out(self):
        model, prompt, at = self.model, self.prompt, self.EDITED
        with pytest.raises(RuntimeError, match="Unavailable: expert_output"), model.trace(prompt, max_tokens=1):
            model.layers[at].mlp.expert_output(0, model.layers[at].mlp_input)
        assert_same(self.engine_logits(), self.clean)


class TestMixtral(Mixture):
    FAMILY = "mixtral"
    CONFIG = {
        "model_type": "mixtral",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    SIZES = {"mlp.num_experts": 5, "mlp.top_k": 2, "mlp.intermediate_size": 96, "self_attn.num_heads": 4}


class TestQwen3Moe(Mixture):
    FAMILY = "qwen3_moe"
    CONFIG = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "moe_intermediate_size": 96,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    SIZES = {"mlp.num_experts": 5, "mlp.top_k": 2, "mlp.intermediate_size": 96, "self_attn.head_dim": 64}


class TestDenseAmongMixtures(EngineSuite):
    """Qwen3-MoE with a dense block in the middle, on which edits are tried."""

    FAMILY = "qwen3_moe"
    CONFIG = {**TestQwen3Moe.CONFIG, "mlp_only_layers": [1]}
    NATIVE = TestQwen3Moe.NATIVE
    SIZES = {"mlp.intermediate_size": 192}
    EXPECTED_UNAVAILABLE = {
        "mlp.mlp_activation": "",
        "mlp.mlp_neurons": "",
        "mlp.router_logits": "no router_logits value",
        "mlp.routed_output": "no routed_output value",
        **dict.fromkeys(IN_KERNEL, ""),
    }

    def test_each_block_has_its_own(self):
        model = self.model
        assert model.moe_layers == [0, 2]
        assert model.support(1)["mlp.mlp_neurons"] is None
        assert model.support(0)["mlp.router_logits"] is None
        assert "experts" in model.support(0)["mlp.mlp_neurons"]
