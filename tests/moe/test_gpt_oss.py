"""GPT-OSS: sinks, a tuple from the mixture, the top k before the softmax, experts with biases."""

from nnterp.testing import MixtureSuite, WithSink, interleaved_expert


class TestGptOss(MixtureSuite):
    FAMILY = "gpt_oss"
    CONFIG = {
        "model_type": "gpt_oss",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    ROUTER = "router"
    EXPERT_WIDTH_KEY = "intermediate_size"
    ATTENTION_SINK = True
    SDPA = False
    FORMULA = WithSink()
    LAYOUTS = {
        "grouped": {},
        "batched_top_1": {"config": {"num_experts_per_tok": 1}, "load": {"experts_implementation": "batched_mm"}},
    }

    def expert(self, experts, expert, tokens):
        return interleaved_expert(experts, expert, tokens)

    def rest_of_block(self, block, mid):
        return mid + block("mlp")(block("post_attention_layernorm")(mid))[0]
