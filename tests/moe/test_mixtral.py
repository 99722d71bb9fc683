"""Mixtral: a mixture in every block, one expert a token or two."""

from nnterp.testing import MixtureSuite


class TestMixtral(MixtureSuite):
    FAMILY = "mixtral"
    CONFIG = {
        "model_type": "mixtral",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPERT_WIDTH_KEY = "intermediate_size"
    LAYOUTS = {"top_2": {}, "top_1": {"config": {"num_experts_per_tok": 1}}}
