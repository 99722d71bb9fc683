"""DeepSeek-V3: latent attention, groups of experts, a selection bias, a shared expert, dense first blocks."""

import torch

from nnterp.testing import MixtureSuite


class TestDeepseekV3(MixtureSuite):
    FAMILY = "deepseek_v3"
    CONFIG = {
        "model_type": "deepseek_v3",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    REFUSES_IN_PLACE = ("self_attn.attention_values",)
    SHARED = "shared_experts"
    EXPERTS_KEY = "n_routed_experts"
    DENSE = (0,)
    GROUPED = True
    OUTPUTS_LOGITS = False
    LAYOUTS = {
        "groups": {},
        "one_group_batched": {
            "config": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
            "load": {"experts_implementation": "batched_mm"},
            "DENSE": (),
            "GROUPED": False,
            "MLP_WIDTH_KEY": "moe_intermediate_size",
        },
    }

    def test_bias_chooses_and_does_not_weight(self):
        model = self.loaded.load()
        moe = model.layers[self.EDITED].mlp
        bias = moe.router._module.e_score_correction_bias
        bias[3] = 10.0
        with model.trace(self.ids):
            logits = moe.router_logits.clone().save()
            scores = moe.choice_scores.clone().save()
            chosen = moe.expert_indices.clone().save()
        assert torch.equal(scores, logits.sigmoid() + bias)
        assert (chosen == 3).any(-1).all()
        with model.trace(self.ids):
            moe.ban_experts(3)
            banned = moe.expert_indices.clone().save()
            output = model.logits.save()
        assert not (banned == 3).any()
        assert torch.isfinite(output).all()
