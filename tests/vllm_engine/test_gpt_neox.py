"""GPT-NeoX: parallel and sequential blocks, on vLLM's transformers backend by the family of transformers."""

import nnterp_families_dense.gpt_neox as family
from nnterp_vllm.testing import EngineSuite


class TestGPTNeoX(EngineSuite):
    FAMILY = "gpt_neox"
    CONFIG = {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
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
    SIZES = {"self_attn.num_heads": 4, "self_attn.head_dim": 32, "mlp.intermediate_size": 192}

    def test_the_family_is_that_of_transformers(self):
        assert self.model.family.family is family
        assert issubclass(type(self.model.layers[0]), family.Layer)
        assert issubclass(type(self.model.layers[0].self_attn), family.Attention)


class TestSequential(TestGPTNeoX):
    CONFIG = {**TestGPTNeoX.CONFIG, "use_parallel_residual": False}
    EXPECTED_UNAVAILABLE = {}
