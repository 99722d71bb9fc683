"""OLMo Hybrid: gated DeltaNet behind pre-norms, attention in front of post-norms, with and without positions."""

import torch
from torch import Tensor

from nnterp.components import POST_NORM
from nnterp.testing import RecurrentSuite, Site
from nnterp.testing.oracles import run
from nnterp.testing.recurrences import DeltaRule

LINEAR, FULL = "linear_attention", "full_attention"
PRE_NORM = ("attention_norm_output", "mlp_norm_output")
#: Where the block with attention has what the plain block has elsewhere.
POST_NORM_SITES = {
    "layer_mid": Site("mlp", "input"),
    "mlp_input": Site("mlp", "input", read=lambda call, stream: stream.clone()),  # apart from the stream it is
    "self_attn.attention_output": Site("post_attention_layernorm"),
    "mlp.mlp_output": Site("post_feedforward_layernorm"),
}


class TestOlmoHybrid(RecurrentSuite):
    FAMILY = "olmo_hybrid"
    CONFIG = {
        "model_type": "olmo_hybrid",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    RECURRENCE = DeltaRule()
    BLOCKS = {"linear_attn": (0, 2), "self_attn": (1, 3), **dict.fromkeys(PRE_NORM, (0, 2))}
    ELSEWHERE = dict.fromkeys(PRE_NORM, POST_NORM)
    MIXER_WIDTH_KEYS = {
        "heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
    }
    A_LOG = (-2, -1)
    LAYOUTS = {
        "no_positions": {},
        "rotary": {
            "config": {
                "linear_num_key_heads": 4,
                "linear_allow_neg_eigval": False,
                "num_key_value_heads": 4,
                "layer_types": [FULL, LINEAR, LINEAR, FULL],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "BLOCKS": {"linear_attn": (1, 2), "self_attn": (0, 3), **dict.fromkeys(PRE_NORM, (1, 2))},
            "REFUSES_IN_PLACE": ("linear_attn.attention_queries", "linear_attn.attention_keys"),
        },
    }

    def prepare(self, model):
        """Step sizes at which decays matter."""
        super().prepare(model)
        for block in model.model.layers:
            if hasattr(block, "linear_attn"):
                block.linear_attn.dt_bias.data = torch.linspace(1, 2, 4)

    # -- two classes of blocks ----------------------------------------------------------------------------------------

    def kind(self, host, layer):
        if not host and layer in self.BLOCKS["linear_attn"]:
            return self.family.LinearLayer
        return super().kind(host, layer)

    def site(self, value, layer, bare):
        if layer in self.BLOCKS["self_attn"] and value in POST_NORM_SITES:
            site = POST_NORM_SITES[value]
            return self.module(f"layers.{layer}.{site.module}", bare), site
        return super().site(value, layer, bare)

    def rest_of_block(self, block, mid):
        if self.block_of("layer_mid") in self.BLOCKS["linear_attn"]:
            return super().rest_of_block(block, mid)
        return mid + block("post_feedforward_layernorm")(block("mlp")(mid))

    def test_sublayers_are_called_with_their_inputs(self):
        for layer in self.blocks:
            linear = layer in self.BLOCKS["linear_attn"]
            mixer, inputs = ("linear_attn", PRE_NORM) if linear else ("self_attn", ("layer_input", "layer_mid"))
            for host, value in zip((mixer, "mlp"), inputs, strict=True):
                site = {"x": (self.module(f"layers.{layer}.{host}"), Site("", "input"))}
                called: Tensor = run(self.bare, lambda: self.bare(**self.inputs()), site)["x"]
                assert torch.equal(self.everything[value, layer], called)
            assert torch.equal(self.everything["mlp_input", layer], called)

    # -- the mixer ----------------------------------------------------------------------------------------------------

    def test_betas_go_up_to_two_where_negative_eigenvalues_are_allowed(self):
        for layer in self.BLOCKS["linear_attn"]:
            betas = self.everything["linear_attn.betas", layer]
            mixer = self.bare_mixer(layer)
            expected = mixer.b_proj(self.everything["attention_norm_output", layer]).sigmoid().detach()
            assert torch.equal(betas, expected * 2 if mixer.allow_neg_eigval else expected)
            assert mixer.allow_neg_eigval == (self.layout_name == "no_positions") == bool((betas > 1).any())
