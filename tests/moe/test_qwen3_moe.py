"""Qwen3-MoE: no shared expert, dense blocks among mixtures, weights normalised or not, one expert a token."""

from nnterp.testing import MixtureSuite


class TestQwen3Moe(MixtureSuite):
    FAMILY = "qwen3_moe"
    CONFIG = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPERTS_KEY = "num_experts"
    MLP_WIDTH_KEY = "moe_intermediate_size"
    LAYOUTS = {
        "normalised": {},
        "every_second_dense": {
            "config": {"norm_topk_prob": False, "decoder_sparse_step": 2},
            "DENSE": (0, 2),
            "MLP_WIDTH_KEY": None,
        },
    }
