"""Llama: fused blocks, heads in groups, embeddings tied or not."""

from nnterp_vllm.testing import EngineSuite

GATED = {"mlp.mlp_activation": "in the same operation"}


class TestLlama(EngineSuite):
    FAMILY = "llama"
    CONFIG = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = GATED
    SIZES = {"num_heads": 4, "self_attn.num_kv_heads": 2, "self_attn.head_dim": 32, "mlp.intermediate_size": 192}


class TestTied(TestLlama):
    CONFIG = {**TestLlama.CONFIG, "tie_word_embeddings": True, "attention_bias": True, "head_dim": 64}
    SIZES = {"self_attn.num_heads": 4, "self_attn.head_dim": 64}
