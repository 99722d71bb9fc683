"""Mamba-2: state-space mixers and nothing else."""

from nnterp.testing import RecurrentSuite
from nnterp.testing.recurrences import ScalarDecay

ONE_SUBLAYER = dict.fromkeys(("layer_mid", "mlp_norm_output", "mlp_input"), "one mixer on the stream")


class TestMamba2(RecurrentSuite):
    FAMILY = "mamba2"
    CONFIG = {
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 4,
        "time_step_rank": 4,
    }
    NATIVE = {
        "embed_tokens": "backbone.embeddings",
        "layers": "backbone.layers",
        "norm": "backbone.norm_f",
        "layers.0.input_layernorm": "backbone.layers.0.norm",
        "layers.0.linear_attn": "backbone.layers.0.mixer",
    }
    EXPECTED_UNAVAILABLE = ONE_SUBLAYER
    RECURRENCE = ScalarDecay()
    HIDDEN_STATES_OF_BLOCKS = True
    BLOCKS = {"self_attn": (), "mlp": ()}
    MIXER_WIDTH_KEYS = {"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "state_dim": "state_size"}
    LAYOUTS = {
        "groups": {},
        "one_group_biases": {
            "config": {"n_groups": 1, "use_bias": True, "tie_word_embeddings": True, "chunk_size": 256},
            "PADDING_MATTERS": True,  # the input projection's bias enters the convolution at the padding
        },
        "limits": {
            "config": {"time_step_limit": [0.02, 0.3], "residual_in_fp32": False, "use_conv_bias": False},
            "LIMITED": True,
        },
    }
