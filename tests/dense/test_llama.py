"""Llama: heads and groups, a head width of its own, biases, tied embeddings."""

from nnterp.testing import FamilySuite


class TestLlama(FamilySuite):
    FAMILY = "llama"
    CONFIG = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    LAYOUTS = {
        "gqa": {},
        "mha": {"config": {"num_key_value_heads": 4}},
        "head_dim": {"config": {"head_dim": 12}},
        "biases": {"config": {"attention_bias": True, "mlp_bias": True}},
        "tied": {"config": {"tie_word_embeddings": True}},
    }
