"""GraniteMoeHybrid: multipliers on Mamba-2 and attention blocks, with a mixture beside the MLP or the MLP alone."""

from typing import Any

from nnterp.testing import MixtureSuite, RecurrentSuite, Site
from nnterp.testing.recurrences import ScalarDecay

INF = float("inf")
CONFIG = {
    "model_type": "granitemoehybrid",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
    "max_position_embeddings": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 6,
    "mamba_chunk_size": 4,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.25,
    "logits_scaling": 4.0,
}
NATIVE = {
    "embed_tokens": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "layers.0.linear_attn": "model.layers.0.mamba",
}
BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3)}
WIDTHS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
}


def scaled(module: str, beside: Any = lambda call: 0) -> Site:
    """What the block adds: a module's output, with what is added to it, times the multiplier."""
    return Site(
        module,
        read=lambda call, tensor: (tensor + beside(call)) * call.model.config.residual_multiplier,
        write=lambda call, tensor, value: value / call.model.config.residual_multiplier - beside(call),
    )


def mixture(call: Any) -> Any:
    """What the mixture makes of what the shared expert, which runs behind it, was called with."""
    block = next(block for block in call.model.model.layers if block.shared_mlp is call.module)
    return block.block_sparse_moe(call.args[0])


MIXERS = {f"{mixer}.attention_output": scaled(mixer) for mixer in ("linear_attn", "self_attn")}


class TestDense(RecurrentSuite):
    """Without experts, ``mlp`` is the MLP that every block has."""

    FAMILY = "granitemoehybrid"
    CONFIG = {**CONFIG, "num_local_experts": 0, "num_experts_per_tok": 0}
    NATIVE = {
        **NATIVE,
        "layers.0.mlp": "model.layers.0.shared_mlp",
        "layers.0.mlp.act_fn": "model.layers.0.shared_mlp.activation",
        "layers.0.mlp.down_proj": "model.layers.0.shared_mlp.output_linear",
    }
    SITES = {**MIXERS, "mlp.mlp_output": scaled("mlp"), "mlp_input": Site("post_attention_layernorm")}
    RECURRENCE = ScalarDecay()
    BLOCKS, MIXER_WIDTH_KEYS = BLOCKS, WIDTHS
    LAYOUTS = {
        "no_positions": {},
        "rotary_and_limits": {
            "config": {
                "position_embedding_type": "rope",
                "time_step_limit": (0.3, 0.9),
                "mamba_n_groups": 2,
                "mamba_conv_bias": False,
                "attention_bias": True,
            },
            "LIMITED": True,
        },
    }

    def rest_of_block(self, block, mid):
        return mid + block("mlp")(block("post_attention_layernorm")(mid)) * self.bare.config.residual_multiplier

    def neurons(self, mlp, activation, entering):
        return activation * mlp.input_linear(entering).chunk(2, dim=-1)[1]


class TestMixture(RecurrentSuite, MixtureSuite):
    """With experts, ``mlp`` is the mixture, and the MLP beside it its shared expert, which has values of its own."""

    FAMILY = "granitemoehybrid"
    CONFIG = {**CONFIG, "num_local_experts": 5, "num_experts_per_tok": 2, "mamba_n_groups": 2}
    NATIVE = {
        **NATIVE,
        "layers.0.mlp": "model.layers.0.block_sparse_moe",
        "layers.0.shared_mlp.act_fn": "model.layers.0.shared_mlp.activation",
        "layers.0.shared_mlp.down_proj": "model.layers.0.shared_mlp.output_linear",
    }
    EXPECTED_UNAVAILABLE = {
        "mlp.mlp_activation": "inside its experts",
        "mlp.mlp_neurons": "inside its experts",
        "shared_mlp.mlp_output": "read shared_expert_output on mlp",
    }
    SITES = {
        **MIXERS,
        "mlp.mlp_output": scaled("shared_mlp", mixture),
        "mlp_input": Site("post_attention_layernorm"),
        "shared_mlp.mlp_activation": Site("shared_mlp.act_fn"),
        "shared_mlp.mlp_neurons": Site("shared_mlp.down_proj", "input"),
    }
    RECURRENCE = ScalarDecay()
    BLOCKS, MIXER_WIDTH_KEYS = BLOCKS, WIDTHS
    ROUTER = "router"
    EXPERT_WIDTH_KEY = "intermediate_size"
    MLP_WIDTH_KEY = "intermediate_size"
    LAYOUTS = {"top_2": {}, "top_1": {"config": {"num_experts_per_tok": 1, "position_embedding_type": "rope"}}}

    @classmethod
    def roles(cls):
        return {**super().roles(), "shared_mlp": "Mlp"}

    def kind(self, host, layer):
        return self.family.Mlp if host == "shared_mlp" else super().kind(host, layer)

    def rest_of_block(self, block, mid):
        normed = block("post_attention_layernorm")(mid)
        return mid + (block("mlp")(normed) + block("shared_mlp")(normed)) * self.bare.config.residual_multiplier

    def mixture_sum(self, routed, shared):
        return super().mixture_sum(routed, shared) * self.bare.config.residual_multiplier

    def shared_site(self, mixture):
        block = next(block for block in self.bare.model.layers if block.block_sparse_moe is mixture)
        return block.shared_mlp, Site("")
