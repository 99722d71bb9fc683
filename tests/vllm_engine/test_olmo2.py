"""OLMo 2 on vLLM's transformers backend: norms after the sublayers alone, a gated feed-forward that vLLM fuses."""

from nnterp.testing import Site
from nnterp_vllm.testing import EngineSuite


class TestOlmo2(EngineSuite):
    FAMILY = "olmo2"
    CONFIG = {
        "model_type": "olmo2",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.input_layernorm": None,
    }
    EXPECTED_UNAVAILABLE = {
        "attention_norm_output": "norms what its sublayers return",
        "mlp_norm_output": "norms what its sublayers return",
        "mlp.mlp_activation": "in the same operation",
    }
    SITES = {
        "layer_mid": Site("mlp", "input"),
        "mlp_input": Site("mlp", "input", read=lambda call, stream: stream.clone()),  # apart from the stream it is
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }
    SIZES = {"self_attn.num_heads": 4, "self_attn.num_kv_heads": 2, "mlp.intermediate_size": 192}

    def rest_of_block(self, block, mid):
        return mid + block("post_feedforward_layernorm")(block("mlp")(mid))
