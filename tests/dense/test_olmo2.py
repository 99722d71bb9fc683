"""OLMo 2: norms after the sublayers alone, and a norm over all heads' queries and keys."""

from nnterp.testing import FamilySuite, Site


class TestOlmo2(FamilySuite):
    FAMILY = "olmo2"
    CONFIG = {
        "model_type": "olmo2",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
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
    }
    ATTENTION_INPUT = "layer_input"
    MLP_INPUT = "layer_mid"
    SITES = {
        "layer_mid": Site("mlp", "input"),
        "mlp_input": Site("mlp", "input", read=lambda call, stream: stream.clone()),  # apart from the stream it is
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }
    LAYOUTS = {"gqa": {}}

    def rest_of_block(self, block, mid):
        return mid + block("post_feedforward_layernorm")(block("mlp")(mid))
