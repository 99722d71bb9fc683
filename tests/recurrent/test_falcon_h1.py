"""Falcon-H1: both mixers in every block, a multiplier on everything, a norm behind the scan or a gate inside it."""

from inspect import getsource
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.falcon_h1 import modeling_falcon_h1 as modeling

from nnterp import StandardizedTransformer
from nnterp.components import Residual
from nnterp.testing import RecurrentSuite, Site, checkpoint
from nnterp.testing.comparing import assert_close
from nnterp.testing.oracles import greedy
from nnterp.testing.recurrences import ScalarDecay


class Gated(ScalarDecay):
    """Without a norm, a decode step's kernel gates its outputs, which are served before."""

    def called(self, kernel, initial):
        self.gate = kernel.arguments.pop("z", None)
        return super().called(kernel, initial)

    def returned(self, kernel, outputs, final):
        if kernel.step and self.gate is not None:
            outputs = outputs * F.silu(self.gate.unsqueeze(1))
        return super().returned(kernel, outputs, final)


def scaled(module: str, multiplier: str) -> Site:
    """What the block adds: a mixer's output, times its multiplier."""

    def factor(call: Any) -> float:
        return getattr(call.model.config, multiplier)

    return Site(
        module,
        read=lambda call, tensor: tensor * factor(call),
        write=lambda call, tensor, value: value / factor(call),
    )


CONFIG = {
    "model_type": "falcon_h1",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 4,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
}
NORMED = {
    "norm_of_the_gated": {
        "config": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False}
    },
    "gate_of_the_normed": {
        "config": {"mamba_rms_norm": True, "mamba_n_groups": 1, "mamba_d_ssm": None, "projectors_bias": True}
    },
}
#: Before transformers 5.24.0 the norm of a decode step mixes the rows of a batch up.
ROWS_APART = "input_ndim" in getsource(modeling.FalconH1RMSNormGated.forward)


class TestFalconH1(RecurrentSuite):
    FAMILY, CONFIG = "falcon_h1", CONFIG
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.final_layernorm",
        "layers.0.post_attention_layernorm": "model.layers.0.pre_ff_layernorm",
        "layers.0.linear_attn": "model.layers.0.mamba",
        "layers.0.mlp": "model.layers.0.feed_forward",
    }
    SITES = {
        "linear_attn.attention_output": scaled("linear_attn", "ssm_out_multiplier"),
        "self_attn.attention_output": scaled("self_attn", "attention_out_multiplier"),
    }
    RECURRENCE = Gated()
    MIXER_WIDTH_KEYS = {
        "heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "groups": "mamba_n_groups",
        "state_dim": "mamba_d_state",
    }
    LAYOUTS = {
        "gate_in_the_kernel": {},
        "limited": {"config": {"time_step_limit": (0.3, 0.9)}, "LIMITED": True},
        **(NORMED if ROWS_APART else {}),
    }

    def mixers(self, layer):
        return ["linear_attn"]  # the attention is called with the norm's output times a multiplier


def test_contributions_of_one_row_in_generation(tmp_path):
    """With a norm behind the scan, on every release: laid out as everywhere, and the block's sum."""
    for name, layout in NORMED.items():
        path = checkpoint.save(checkpoint.config(**{**CONFIG, **layout["config"]}), tmp_path / name)
        model = StandardizedTransformer(str(path), dispatch=True)
        block = model.layers[1]
        with torch.no_grad(), model.generate(torch.tensor([[5, 6, 7, 8]]), **greedy(3)) as tracer:
            read = [].save()
            for _ in tracer.iter[0:3]:
                entering = block.layer_input.clone()
                terms = [block.linear_attn.attention_output.clone()]
                terms += [part.clone() for part in (block.self_attn.attention_output, block.mlp.mlp_output)]
                read.append((entering, terms, block.layer_output.clone()))
        for entering, terms, leaving in read:
            assert all(isinstance(term, Residual) and term.shape == entering.shape for term in terms)
            assert_close(entering + sum(terms), leaving)
