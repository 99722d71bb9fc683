"""The whole text suite on multimodal checkpoints: what holds of a family's own model holds of its wrappers."""

from nnterp.testing import FamilySuite, Site

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


class TestIdefics3(FamilySuite):
    """Llama under ``text_model``."""

    FAMILY = "llama"
    CONFIG = {
        "model_type": "idefics3",
        "image_token_id": 299,
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "idefics3_vision", **TOWER},
    }
    NATIVE = {
        "embed_tokens": "model.text_model.embed_tokens",
        "layers": "model.text_model.layers",
        "norm": "model.text_model.norm",
    }


class TestSmolVLM(FamilySuite):
    """Llama under ``text_model`` again, with tied embeddings."""

    FAMILY = "llama"
    CONFIG = {
        "model_type": "smolvlm",
        "image_token_id": 299,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "llama", **TEXT, "tie_word_embeddings": True},
        "vision_config": {"model_type": "smolvlm_vision", **TOWER},
    }
    NATIVE = TestIdefics3.NATIVE


class TestMistral3(FamilySuite):
    """Mistral under ``language_model``, its windows shorter than the prompts."""

    FAMILY = "mistral"
    CONFIG = {
        "model_type": "mistral3",
        "image_token_index": 299,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 12, "sliding_window": 3},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 8, "image_size": 32},
    }
    NATIVE = {
        "embed_tokens": "model.language_model.embed_tokens",
        "layers": "model.language_model.layers",
        "norm": "model.language_model.norm",
    }

    def visible(self, layer):
        return super().visible(layer).triu(-2)


class TestGemma3(FamilySuite):
    """Gemma 3 under ``language_model``, whose head the text config's cap does not reach in the wrapper."""

    FAMILY = "gemma3_text"
    CONFIG = {
        "model_type": "gemma3",
        "image_token_index": 299,
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text",
            **TEXT,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 2.0,
        },
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
    }
    NATIVE = {
        "embed_tokens": "model.language_model.embed_tokens",
        "layers": "model.language_model.layers",
        "norm": "model.language_model.norm",
    }
    SITES = {
        "layer_mid": Site("pre_feedforward_layernorm", "input"),
        "mlp_norm_output": Site("pre_feedforward_layernorm"),
        "self_attn.attention_output": Site("post_attention_layernorm"),
        "mlp.mlp_output": Site("post_feedforward_layernorm"),
    }

    def rest_of_block(self, block, mid):
        term = block("mlp")(block("pre_feedforward_layernorm")(mid))
        return mid + block("post_feedforward_layernorm")(term)
