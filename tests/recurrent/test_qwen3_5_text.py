"""Qwen3.5: gated DeltaNet among attention with gated queries, a dense feed-forward in each block."""

import torch

from nnterp.testing import RecurrentSuite
from nnterp.testing.recurrences import DeltaRule

LINEAR, FULL = "linear_attention", "full_attention"


class TestQwen35Text(RecurrentSuite):
    FAMILY = "qwen3_5_text"
    CONFIG = {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    RECURRENCE = DeltaRule()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
    MIXER_WIDTH_KEYS = {
        "heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
    }
    LAYOUTS = {
        "shared_keys": {},
        "own_keys": {
            "config": {"linear_num_key_heads": 4, "layer_types": [FULL, LINEAR, LINEAR, FULL]},
            "BLOCKS": {"linear_attn": (1, 2), "self_attn": (0, 3)},
            "REFUSES_IN_PLACE": ("linear_attn.attention_queries", "linear_attn.attention_keys"),
        },
    }

    def prepare(self, model):
        """States that are kept for some tokens, and keys large enough that norming them magnifies no rounding."""
        super().prepare(model)
        for block in model.model.layers:
            if hasattr(block, "linear_attn"):
                block.linear_attn.A_log.data = torch.linspace(-3, -1, 4)
                block.linear_attn.conv1d.weight.data *= 4

    def test_the_premix_is_gated(self):
        """By the half of the query projection that is not the queries."""
        for layer in self.BLOCKS["self_attn"]:
            attention = self.module(f"layers.{layer}.self_attn")
            projected = attention.q_proj(self.everything["attention_norm_output", layer])
            gate = projected.unflatten(-1, (4, 2, -1))[..., 1, :].detach()
            mixed = self.everything["self_attn.attention_head_outputs", layer]
            premix = self.everything["self_attn.attention_premix", layer]
            torch.testing.assert_close(premix, mixed * gate.sigmoid())
            assert not torch.allclose(premix, mixed)
