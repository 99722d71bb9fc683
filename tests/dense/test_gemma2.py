"""Gemma 2: sandwich norms, soft caps set and unset, sliding and full blocks, heads wider than their share."""

import torch

from nnterp.testing import FamilySuite, Formula, Site


class SoftCapped(Formula):
    def scores(self, module, query, key, mask, scaling, **options):
        scores, cap = torch.matmul(query, key.transpose(-1, -2)) * scaling, module.config.attn_logit_softcapping
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        return scores if mask is None else scores + mask


class TestGemma2(FamilySuite):
    FAMILY = "gemma2"
    CONFIG = {
        "model_type": "gemma2",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "query_pre_attn_scalar": 20,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    SITES = {
        "layer_mid": Site("pre_feedforward_layernorm", "input"),
        "mlp_norm_output": Site("pre_feedforward_layernorm"),
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }
    FORMULA = SoftCapped()
    SDPA = False  # it computes no soft cap: other numbers, and later releases of transformers refuse
    LAYOUTS = {
        "full": {},
        "sliding": {"EDITED": 2},
        "no_soft_caps": {"config": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    }

    def rest_of_block(self, block, mid):
        term = block("mlp")(block("pre_feedforward_layernorm")(mid))
        return mid + block("post_feedforward_layernorm")(term)
