"""GLM-MoE-DSA: a sparse selection of keys, a block that returns a tuple, dense first blocks."""

from nnterp.testing import BiasedMixtureSuite


class TestGlmMoeDsa(BiasedMixtureSuite):
    FAMILY = "glm_moe_dsa"
    CONFIG = {
        "model_type": "glm_moe_dsa",
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
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    REFUSES_IN_PLACE = ("self_attn.attention_values",)
    SHARED = "shared_experts"
    EXPERTS_KEY = "n_routed_experts"
    DENSE = (0,)
    OUTPUTS_LOGITS = False
    LAYOUTS = {"selected_keys": {}}
