"""Falcon-Mamba: selective scans whose step size, keys and queries are normed."""

from nnterp.testing import RecurrentSuite
from nnterp.testing.recurrences import Scan

ONE_SUBLAYER = dict.fromkeys(("layer_mid", "mlp_norm_output", "mlp_input"), "one mixer on the stream")


class NormedScan(Scan):
    """Keys and queries come out of norms of their own, which can be edited in place."""

    REFUSES_IN_PLACE = ()


class TestFalconMamba(RecurrentSuite):
    FAMILY = "falcon_mamba"
    CONFIG = {
        "model_type": "falcon_mamba",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 6,
        "time_step_rank": 4,
        "conv_kernel": 4,
        "mixer_rms_eps": 1e-3,
    }
    NATIVE = {
        "embed_tokens": "backbone.embeddings",
        "layers": "backbone.layers",
        "norm": "backbone.norm_f",
        "layers.0.input_layernorm": "backbone.layers.0.norm",
        "layers.0.linear_attn": "backbone.layers.0.mixer",
    }
    EXPECTED_UNAVAILABLE = ONE_SUBLAYER
    RECURRENCE = NormedScan()
    HIDDEN_STATES_OF_BLOCKS = True
    BLOCKS = {"self_attn": (), "mlp": ()}
    MIXER_WIDTH_KEYS = {"channels": "intermediate_size", "state_dim": "state_size"}
    LAYOUTS = {
        "default": {},
        "biased": {
            "config": {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "conv_kernel": 3},
            "PADDING_MATTERS": True,  # the convolution takes in what the projection's bias makes of padding
        },
    }
