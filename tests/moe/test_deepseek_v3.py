"""DeepSeek-V3: latent attention, groups of experts, a selection bias, a shared expert, dense first blocks."""

from nnterp.testing import BiasedMixtureSuite


class TestDeepseekV3(BiasedMixtureSuite):
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
