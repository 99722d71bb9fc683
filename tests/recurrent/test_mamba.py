"""Mamba: selective scans and nothing else."""

from nnterp.testing import RecurrentSuite
from nnterp.testing.recurrences import Scan

ONE_SUBLAYER = dict.fromkeys(("layer_mid", "mlp_norm_output", "mlp_input"), "one mixer on the stream")


class TestMamba(RecurrentSuite):
    FAMILY = "mamba"
    CONFIG = {
        "model_type": "mamba",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 6,
        "time_step_rank": 4,
        "conv_kernel": 4,
    }
    NATIVE = {
        "embed_tokens": "backbone.embeddings",
        "layers": "backbone.layers",
        "norm": "backbone.norm_f",
        "layers.0.input_layernorm": "backbone.layers.0.norm",
        "layers.0.linear_attn": "backbone.layers.0.mixer",
    }
    EXPECTED_UNAVAILABLE = ONE_SUBLAYER
    RECURRENCE = Scan()
    HIDDEN_STATES_OF_BLOCKS = True
    BLOCKS = {"self_attn": (), "mlp": ()}
    MIXER_WIDTH_KEYS = {"channels": "intermediate_size", "state_dim": "state_size"}
    LAYOUTS = {
        "plain": {},
        "biases_tied_float32": {
            "config": {"use_bias": True, "tie_word_embeddings": True, "residual_in_fp32": True, "conv_kernel": 2},
            "PADDING_MATTERS": True,  # the input projection's bias enters the convolution at the padding
        },
        "inner_width": {"config": {"expand": 3, "use_conv_bias": False, "residual_in_fp32": False}},
    }
