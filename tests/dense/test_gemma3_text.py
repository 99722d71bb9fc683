"""Gemma 3's text model: sandwich norms, query and key norms, sliding and full blocks, a capped head."""

from nnterp.testing import FamilySuite, Site


class TestGemma3Text(FamilySuite):
    FAMILY = "gemma3_text"
    CONFIG = {
        "model_type": "gemma3_text",
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
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    SITES = {
        "layer_mid": Site("pre_feedforward_layernorm", "input"),
        "mlp_norm_output": Site("pre_feedforward_layernorm"),
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }
    LAYOUTS = {
        "full": {},
        "sliding": {"EDITED": 2},
        "soft_capped": {"config": {"final_logit_softcapping": 2.0}},
    }

    def rest_of_block(self, block, mid):
        term = block("mlp")(block("pre_feedforward_layernorm")(mid))
        return mid + block("post_feedforward_layernorm")(term)
