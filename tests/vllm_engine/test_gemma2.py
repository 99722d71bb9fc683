"""Gemma 2: sandwich norms, soft caps, sliding and full blocks, embeddings that the engine scales behind the module."""

import torch

from nnterp.testing import Formula, Site
from nnterp_vllm.testing import EngineSuite


class SoftCapped(Formula):
    def scores(self, module, query, key, mask, scaling, **options):
        scores, cap = torch.matmul(query, key.transpose(-1, -2)) * scaling, module.config.attn_logit_softcapping
        scores = cap * torch.tanh(scores / cap)
        return scores if mask is None else scores + mask


class TestGemma2(EngineSuite):
    FAMILY = "gemma2"
    CONFIG = {
        "model_type": "gemma2",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "query_pre_attn_scalar": 20,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 2.0,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "in the same operation"}
    SITES = {
        "token_embeddings": Site(
            "/embed_tokens",
            read=lambda call, scaled: scaled / 128**0.5,
            write=lambda call, scaled, value: value * 128**0.5,
        ),
        "layer_mid": Site("pre_feedforward_layernorm", "input"),
        "mlp_norm_output": Site("pre_feedforward_layernorm"),
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }
    FORMULA = SoftCapped()
    SIZES = {"self_attn.num_heads": 4, "self_attn.head_dim": 64}

    def rest_of_block(self, block, mid):
        term = block("mlp")(block("pre_feedforward_layernorm")(mid))
        return mid + block("post_feedforward_layernorm")(term)

    def visible(self, layer):
        return super().visible(layer).triu(-2) if layer != 1 else super().visible(layer)
