"""Jamba: scans and attention, dense blocks and mixtures, one block of each pair."""

from nnterp.testing import MixtureSuite, RecurrentSuite
from nnterp.testing.recurrences import Scan

CONFIG = {
    "model_type": "jamba",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 3,
    "expert_layer_offset": 0,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 6,
    "mamba_dt_rank": 4,
}
NATIVE = {
    "embed_tokens": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.final_layernorm",
    "layers.0.post_attention_layernorm": "model.layers.0.pre_ff_layernorm",
    "layers.0.linear_attn": "model.layers.0.mamba",
    "layers.0.mlp": "model.layers.0.feed_forward",
}
MIXERS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
INSIDE = dict.fromkeys(("mlp.mlp_activation", "mlp.mlp_neurons"), "inside its experts")


class NormedScan(Scan):
    """Keys and queries come out of norms of their own, which can be edited in place."""

    REFUSES_IN_PLACE = ()


class TestJamba(RecurrentSuite, MixtureSuite):
    FAMILY, CONFIG, NATIVE = "jamba", CONFIG, NATIVE
    EXPECTED_UNAVAILABLE = {"mlp.shared_expert_output": "no shared expert"}
    RECURRENCE = NormedScan()
    BLOCKS = {**MIXERS, **dict.fromkeys(INSIDE, (1, 2))}
    ELSEWHERE = INSIDE
    MIXER_WIDTH_KEYS = {"state_dim": "mamba_d_state"}
    EDITED = 3
    DENSE = (1, 2)
    ROUTER = "router"
    EXPERTS_KEY = "num_experts"
    EXPERT_WIDTH_KEY = "intermediate_size"
    LAYOUTS = {
        "top_2": {},
        "top_1_of_the_scans": {
            "config": {"num_experts_per_tok": 1, "expert_layer_period": 2},
            "EDITED": 2,
            "DENSE": (1, 3),
            "BLOCKS": {**MIXERS, **dict.fromkeys(INSIDE, (1, 3))},
        },
    }


class TestDense(RecurrentSuite):
    """One expert is none: every block has an MLP."""

    FAMILY, NATIVE = "jamba", NATIVE
    CONFIG = {**CONFIG, "num_experts": 1, "use_mamba_kernels": False}
    RECURRENCE = NormedScan()
    BLOCKS = MIXERS
    MIXER_WIDTH_KEYS = {"state_dim": "mamba_d_state"}
    LAYOUTS = {
        "biased": {
            "config": {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
            "PADDING_MATTERS": True,  # the convolution takes in what the projection's bias makes of padding
        },
    }
