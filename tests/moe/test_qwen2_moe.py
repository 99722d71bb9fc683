"""Qwen2-MoE: a gated shared expert, mixtures among dense blocks, weights normalised or not."""

from nnterp.testing import GatedSharedExpert, MixtureSuite


class TestQwen2Moe(GatedSharedExpert, MixtureSuite):
    FAMILY = "qwen2_moe"
    CONFIG = {
        "model_type": "qwen2_moe",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    SHARED = "shared_expert"
    EXPERTS_KEY = "num_experts"
    MLP_WIDTH_KEY = "moe_intermediate_size"
    LAYOUTS = {
        "plain": {},
        "normalised_batched_dense": {
            "config": {"norm_topk_prob": True, "mlp_only_layers": [0]},
            "load": {"experts_implementation": "batched_mm"},
            "DENSE": (0,),
            "MLP_WIDTH_KEY": None,
        },
    }
