"""Qwen3: fused blocks, queries and keys normed per head."""

from nnterp_vllm.testing import EngineSuite


class TestQwen3(EngineSuite):
    FAMILY = "qwen3"
    CONFIG = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "in the same operation"}
    SIZES = {"self_attn.num_heads": 4, "self_attn.num_kv_heads": 2, "self_attn.qk_head_dim": 64}
