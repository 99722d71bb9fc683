"""Qwen 2: groups and whole heads, tied embeddings, windows on some blocks."""

from nnterp.testing import FamilySuite


class TestQwen2(FamilySuite):
    FAMILY = "qwen2"
    CONFIG = {
        "model_type": "qwen2",
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
        "mha_tied": {"config": {"num_key_value_heads": 4, "tie_word_embeddings": True}},
        "windows": {"config": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}},
    }
