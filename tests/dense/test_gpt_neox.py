"""GPT-NeoX: parallel and sequential residuals, and rotary positions on part of each head."""

from nnterp.testing import FamilySuite


class TestGPTNeoX(FamilySuite):
    FAMILY = "gpt_neox"
    CONFIG = {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NATIVE = {
        "embed_tokens": "gpt_neox.embed_in",
        "layers": "gpt_neox.layers",
        "norm": "gpt_neox.final_layer_norm",
        "layers.0.self_attn": "gpt_neox.layers.0.attention",
        "layers.0.self_attn.o_proj": "gpt_neox.layers.0.attention.dense",
        "layers.0.mlp.act_fn": "gpt_neox.layers.0.mlp.act",
        "layers.0.mlp.down_proj": "gpt_neox.layers.0.mlp.dense_4h_to_h",
    }
    EXPECTED_UNAVAILABLE = {"layer_mid": "parallel"}
    LAYOUTS = {
        "parallel": {},
        "sequential": {"config": {"use_parallel_residual": False}, "EXPECTED_UNAVAILABLE": {}},
        "rotary_half": {
            "config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
        },
    }
