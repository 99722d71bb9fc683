"""Qwen3-Next: gated DeltaNet among attention with gated queries, mixtures with a gated shared expert."""

from transformers import AutoModelForCausalLM

from nnterp import StandardizedTransformer
from nnterp.testing import GatedQueries, GatedSharedExpert, MixtureSuite, RecurrentSuite, checkpoint
from nnterp.testing.recurrences import DeltaRule


class TestQwen3Next(GatedQueries, RecurrentSuite, GatedSharedExpert, MixtureSuite):
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
    A_LOG = (-3, -1)
    CONVOLUTION = 20  # keys large enough that norming them magnifies no rounding
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

    def test_mixtures_every_other_block(self):
        """``decoder_sparse_step`` and ``mlp_only_layers`` together say which blocks are dense."""
        fields = {**self.CONFIG, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        bare = AutoModelForCausalLM.from_config(checkpoint.config(**fields)).eval()
        model = StandardizedTransformer(bare)
        assert model.moe_layers == [1] and model.mlp_layers == [0, 1, 2, 3]
        assert type(model.layers[3].mlp) is self.family.Mlp and type(model.layers[1].mlp) is self.family.Moe
