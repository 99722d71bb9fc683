"""GPT-2: plain blocks, a feed-forward that is not gated."""

from nnterp_vllm.testing import EngineSuite


class TestGPT2(EngineSuite):
    FAMILY = "gpt2"
    CONFIG = {"model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 192}
    NATIVE = {
        "embed_tokens": "transformer.wte",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "layers.0.input_layernorm": "transformer.h.0.ln_1",
        "layers.0.self_attn": "transformer.h.0.attn",
        "layers.0.self_attn.o_proj": "transformer.h.0.attn.c_proj",
        "layers.0.post_attention_layernorm": "transformer.h.0.ln_2",
        "layers.0.mlp.act_fn": "transformer.h.0.mlp.act",
        "layers.0.mlp.down_proj": "transformer.h.0.mlp.c_proj",
    }
    SIZES = {"intermediate_size": 192, "self_attn.num_heads": 4, "mlp.intermediate_size": 192}
