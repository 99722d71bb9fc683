"""Mistral: fused blocks, whose queries see a window of keys."""

from nnterp_vllm.testing import EngineSuite


class TestMistral(EngineSuite):
    FAMILY = "mistral"
    CONFIG = {
        "model_type": "mistral",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "sliding_window": 3,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "in the same operation"}
    SIZES = {"self_attn.num_heads": 4, "mlp.intermediate_size": 192}

    def visible(self, layer):
        return super().visible(layer).triu(-2)
