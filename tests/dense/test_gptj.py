"""GPT-J: parallel blocks on one norm, a head with a bias, float32 scores, rotary positions on part of each head."""

import torch

from nnterp.families import gptj
from nnterp.testing import FamilySuite, Formula, Site


class Float32Scores(Formula):
    def scores(self, module, query, key, mask, scaling, **options):
        return super().scores(module, query.float(), key.float(), mask, scaling)

    def pattern(self, module, scores):
        return torch.softmax(scores, dim=-1)


class TestGPTJ(FamilySuite):
    FAMILY = "gptj"
    CONFIG = {
        "model_type": "gptj",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 48,
        "rotary_dim": 4,
    }
    NATIVE = {
        "embed_tokens": "transformer.wte",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "layers.0.input_layernorm": "transformer.h.0.ln_1",
        "layers.0.post_attention_layernorm": None,
        "layers.0.self_attn": "transformer.h.0.attn",
        "layers.0.self_attn.o_proj": "transformer.h.0.attn.out_proj",
        "layers.0.mlp.act_fn": "transformer.h.0.mlp.act",
        "layers.0.mlp.down_proj": "transformer.h.0.mlp.fc_out",
    }
    EXPECTED_UNAVAILABLE = {"layer_mid": "parallel"}
    SITES = {"mlp_norm_output": Site("input_layernorm")}
    FORMULA = Float32Scores(gptj.Attention.METHOD)
    SDPA = gptj.Attention.METHOD is None
    LAYOUTS = {"default": {}, "n_inner_unset": {"config": {"n_inner": None, "rotary_dim": 8}}}

    def unmasked_scores(self, module, queries, keys):
        return self.FORMULA.scores(module, queries, keys, None, module.head_dim**-0.5)
