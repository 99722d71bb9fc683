"""Nemotron-H: one sublayer a block; dense blocks and mixtures, whose experts may work in a space of their own."""

from contextlib import contextmanager

import torch

from nnterp.testing import BiasedMixtureSuite, Loop, RecurrentSuite, Site
from nnterp.testing.recurrences import ScalarDecay

KINDS = ["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention"]
MIXED = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "full_attention"]
INSIDE = dict.fromkeys(("mlp.mlp_activation", "mlp.mlp_neurons"), "inside its experts")
CONFIG = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "ssm_state_size": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "chunk_size": 4,
    "time_step_min": 1e-6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
}
NATIVE = {
    "embed_tokens": "model.embeddings",
    "layers": "model.layers",
    "norm": "model.norm_f",
    "layers.0.input_layernorm": "model.layers.0.norm",
    "layers.0.linear_attn": "model.layers.0.mixer",
    "layers.0.self_attn": "model.layers.0.mixer",
    "layers.0.mlp": "model.layers.0.mixer",
}
WIDTHS = {"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state_dim": "ssm_state_size"}

SITES = {"mlp_norm_output": Site("input_layernorm")}


def blocks(linear_attn, self_attn, mlp):
    """Which blocks have what: the norm of each is that of its one sublayer."""
    norms = {"attention_norm_output": (*linear_attn, *self_attn), "mlp_norm_output": mlp, "mlp_input": mlp}
    return {"linear_attn": linear_attn, "self_attn": self_attn, "mlp": mlp, **norms}


class OneSublayer(RecurrentSuite):
    FAMILY, NATIVE, SITES, MIXER_WIDTH_KEYS = "nemotron_h", NATIVE, SITES, WIDTHS
    EXPECTED_UNAVAILABLE = {"layer_mid": "one sublayer"}
    RECURRENCE = ScalarDecay()
    ELSEWHERE = {
        "attention_norm_output": "is its mlp",
        "mlp_norm_output": "the one sublayer of this block is its",
        "mlp_input": "no mlp module",
    }

    def prepare(self, model):
        """Step sizes of about one, so that what a token writes counts."""
        super().prepare(model)
        for block in model.model.layers:
            if hasattr(block.mixer, "dt_bias"):
                block.mixer.dt_bias.data = torch.linspace(0.5, 1.5, block.mixer.num_heads)


class TestDense(OneSublayer):
    CONFIG = {**CONFIG, "layers_block_type": KINDS}
    BLOCKS = blocks((0, 3), (2, 4), (1,))
    LAYOUTS = {
        "groups": {},
        "one_group": {"config": {"n_groups": 1, "mlp_bias": True, "use_conv_bias": False}},
        "limited": {"config": {"time_step_min": 1.2}, "LIMITED": True},
    }


class Projected(Loop):
    """What the experts' sum comes to is what a layer behind them makes of it, the identity where they are as wide."""

    @contextmanager
    def looping(self, at):
        def but_the_sum(part, flat):
            return flat if part == "routed_output" else at(part, flat)

        projection = self.mixture.fc2_latent_proj
        handle = projection.register_forward_hook(lambda module, args, output: at("routed_output", output))
        try:
            with super().looping(but_the_sum):
                yield
        finally:
            handle.remove()


class TestMixture(OneSublayer, BiasedMixtureSuite):
    CONFIG = {**CONFIG, "layers_block_type": MIXED}
    EXPECTED_UNAVAILABLE = OneSublayer.EXPECTED_UNAVAILABLE
    BLOCKS = {**blocks((0, 4), (2, 5), (1, 3)), **dict.fromkeys(INSIDE, (3,))}
    DENSE = (0, 2, 3, 4, 5)
    SHARED = "shared_experts"
    EXPERTS_KEY = "n_routed_experts"
    OUTPUTS_LOGITS = False
    LOOP = Projected
    LAYOUTS = {
        "plain": {"MLP_WIDTH_KEY": "moe_intermediate_size"},
        "groups_in_a_space_of_their_own": {
            "config": {"n_group": 2, "topk_group": 1, "moe_latent_size": 16, "norm_topk_prob": False},
            "GROUPED": True,
            "MLP_WIDTH_KEY": "moe_intermediate_size",
        },
    }

    def expected_reason(self, value, layer):
        if value in INSIDE and layer == 1:
            return INSIDE[value]
        return super().expected_reason(value, layer)

    def in_the_stream(self, slots):
        return self.module("layers.1.mlp").fc2_latent_proj(slots).detach()

    def expert(self, experts, expert, tokens):
        """Of the experts' own input, or of the stream."""
        mixture, width = self.module("layers.1.mlp"), experts.up_proj.shape[-1]
        entering = tokens if tokens.shape[-1] == width else mixture.fc1_latent_proj(tokens)
        out = experts.act_fn(entering @ experts.up_proj[expert].T) @ experts.down_proj[expert].T
        return out if tokens.shape[-1] == width else mixture.fc2_latent_proj(out)

    def routed_site(self, mixture):
        return mixture.fc2_latent_proj, Site("")
