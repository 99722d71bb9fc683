"""GPT-2: queries, keys and values that are views of one projection, and its two other ways of scoring."""

from nnterp.testing import FamilySuite

UPCAST = "reorder_and_upcast_attn"


class TestGPT2(FamilySuite):
    FAMILY = "gpt2"
    CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
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
    REFUSES_IN_PLACE = ("self_attn.attention_queries",)
    LAYOUTS = {
        "default": {},
        "reorder_and_upcast_attn": {
            "config": {"reorder_and_upcast_attn": True},
            "EXPECTED_UNAVAILABLE": {
                f"self_attn.attention_{part}": UPCAST
                for part in ("queries", "keys", "values", "scores", "probabilities", "head_outputs")
            },
            "UNDER_SDPA": {
                f"self_attn.attention_{part}": "attn_implementation" for part in ("scores", "probabilities")
            },
        },
        "scale_attn_by_inverse_layer_idx": {"config": {"scale_attn_by_inverse_layer_idx": True}},
        "n_inner": {"config": {"n_inner": 56}},
    }
