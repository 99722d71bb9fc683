"""Qwen3.5: gated DeltaNet among attention with gated queries, a dense feed-forward in each block."""

from nnterp.testing import GatedQueries, RecurrentSuite
from nnterp.testing.recurrences import DeltaRule

LINEAR, FULL = "linear_attention", "full_attention"


class TestQwen35Text(GatedQueries, RecurrentSuite):
    FAMILY = "qwen3_5_text"
    CONFIG = {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    RECURRENCE = DeltaRule()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
    MIXER_WIDTH_KEYS = {
        "heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
    }
    A_LOG = (-3, -1)
    CONVOLUTION = 20  # keys large enough that norming them magnifies no rounding
    LAYOUTS = {
        "shared_keys": {},
        "own_keys": {
            "config": {"linear_num_key_heads": 4, "layer_types": [FULL, LINEAR, LINEAR, FULL]},
            "BLOCKS": {"linear_attn": (1, 2), "self_attn": (0, 3)},
            "REFUSES_IN_PLACE": ("linear_attn.attention_queries", "linear_attn.attention_keys"),
        },
    }
