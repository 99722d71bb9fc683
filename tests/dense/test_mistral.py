"""Mistral: with a window and without, heads wider than their share."""

from nnterp.testing import FamilySuite


class TestMistral(FamilySuite):
    FAMILY = "mistral"
    CONFIG = {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "sliding_window": None,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    LAYOUTS = {
        "gqa": {},
        "head_dim": {"config": {"head_dim": 12}},
        "window": {"config": {"sliding_window": 3}},
    }
