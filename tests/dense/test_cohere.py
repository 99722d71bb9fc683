"""Cohere: one norm for both sublayers of a parallel block, scaled logits, with and without query and key norms."""

from nnterp.testing import FamilySuite, Site


class TestCohere(FamilySuite):
    FAMILY = "cohere"
    CONFIG = {
        "model_type": "cohere",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "logit_scale": 0.25,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.post_attention_layernorm": None,
    }
    EXPECTED_UNAVAILABLE = {"layer_mid": "parallel"}
    SITES = {"mlp_norm_output": Site("input_layernorm")}
    LAYOUTS = {
        "gqa": {},
        "qk_norm": {"config": {"use_qk_norm": True}},
    }
