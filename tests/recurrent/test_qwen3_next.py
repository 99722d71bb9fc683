"""Qwen3-Next: gated DeltaNet among attention with gated queries, mixtures with a gated shared expert."""

import torch
from transformers import AutoModelForCausalLM

from nnterp import StandardizedTransformer
from nnterp.testing import MixtureSuite, RecurrentSuite, Site, checkpoint
from nnterp.testing.recurrences import DeltaRule


class TestQwen3Next(RecurrentSuite, MixtureSuite):
    FAMILY = "qwen3_next"
    CONFIG = {
        "model_type": "qwen3_next",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {
        name: reason for name, reason in MixtureSuite.EXPECTED_UNAVAILABLE.items() if "shared" not in name
    }
    RECURRENCE = DeltaRule()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
    MIXER_WIDTH_KEYS = {
        "heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
    }
    SHARED = "shared_expert"
    EXPERTS_KEY = "num_experts"
    MLP_WIDTH_KEY = "moe_intermediate_size"
    LAYOUTS = {
        "key_heads_repeated": {},
        "as_many_key_heads_and_dense_blocks": {
            "config": {"linear_num_key_heads": 4, "mlp_only_layers": [0, 1], "norm_topk_prob": True},
            "DENSE": (0, 1),
            "EDITED": 2,
            "MLP_WIDTH_KEY": None,
            "REFUSES_IN_PLACE": ("linear_attn.attention_queries", "linear_attn.attention_keys"),
        },
        "attention_first_and_last": {
            "config": {
                "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 2,
            },
            "BLOCKS": {"linear_attn": (1, 2), "self_attn": (0, 3)},
        },
    }

    def prepare(self, model):
        """States that are kept for some tokens, and keys large enough that norming them magnifies no rounding."""
        super().prepare(model)
        for block in model.model.layers:
            if hasattr(block, "linear_attn"):
                block.linear_attn.A_log.data = torch.linspace(-3, -1, 4)
                block.linear_attn.conv1d.weight.data *= 4

    def shared_site(self, mixture):
        def gate(call):
            return torch.sigmoid(mixture.shared_expert_gate(call.args[0]))

        return mixture.shared_expert, Site(
            "",
            read=lambda call, tensor: tensor * gate(call),
            write=lambda call, tensor, value: value / gate(call),
        )

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

    def test_mixtures_every_other_block(self):
        """``decoder_sparse_step`` and ``mlp_only_layers`` together say which blocks are dense."""
        fields = {**self.CONFIG, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        bare = AutoModelForCausalLM.from_config(checkpoint.config(**fields)).eval()
        model = StandardizedTransformer(bare)
        assert model.moe_layers == [1] and model.mlp_layers == [0, 1, 2, 3]
        assert type(model.layers[3].mlp) is self.family.Mlp and type(model.layers[1].mlp) is self.family.Moe
