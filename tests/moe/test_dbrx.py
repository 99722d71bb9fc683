"""DBRX: a nested half block, clamped projections, experts outside transformers' interface."""

import pytest

from nnterp.testing import MixtureSuite


class TestDbrx(MixtureSuite):
    FAMILY = "dbrx"
    CONFIG = {
        "model_type": "dbrx",
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2},
    }
    NATIVE = {
        "embed_tokens": "transformer.wte",
        "layers": "transformer.blocks",
        "norm": "transformer.norm_f",
        "layers.0.self_attn": "transformer.blocks.0.norm_attn_norm.attn",
        "layers.0.self_attn.o_proj": "transformer.blocks.0.norm_attn_norm.attn.out_proj",
        "layers.0.input_layernorm": "transformer.blocks.0.norm_attn_norm.norm_1",
        "layers.0.post_attention_layernorm": "transformer.blocks.0.norm_attn_norm.norm_2",
        "layers.0.mlp": "transformer.blocks.0.ffn",
    }
    EXPECTED_UNAVAILABLE = {**MixtureSuite.EXPECTED_UNAVAILABLE, "mlp.expert_outputs": "experts interface"}
    ROUTER = "router"
    EXPERTS_KEY = "ffn_config.moe_num_experts"
    TOP_K_KEY = "ffn_config.moe_top_k"
    EXPERT_WIDTH_KEY = "ffn_config.ffn_hidden_size"
    IMPLEMENTATIONS = False
    OUTPUTS_LOGITS = False
    LAYOUTS = {"normed": {}}

    def scanned(self):
        pytest.skip("its experts' loop runs over what the router chose, which shapes alone do not say")

    def expert(self, experts, expert, tokens):
        gate, up, down = (
            weight.unflatten(0, (experts.num_experts, -1))[expert]
            for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)
        )
        return (experts.mlp.activation_fn(tokens @ gate.T) * (tokens @ up.T)) @ down

    def mlp_parameters(self):
        experts = self.module("layers.0.mlp").experts
        return [weight.unflatten(0, (experts.num_experts, -1)) for weight in experts.parameters()]
