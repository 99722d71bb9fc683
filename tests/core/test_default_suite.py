"""The conformance kit on the best-effort family: what it serves is read, edited and loaded as on any family."""

import pytest

from nnterp import families
from nnterp.families import default
from nnterp.testing.loading import Loading
from nnterp.testing.running import Running
from nnterp.testing.writing import Writing

NOT_SHOWN = (
    "attention_norm_output",
    "layer_mid",
    "mlp_norm_output",
    "self_attn.attention_output",
    "mlp.mlp_output",
)


class BestEffort(Writing, Running, Loading):
    FAMILY = default
    EXPECTED_UNAVAILABLE = dict.fromkeys(NOT_SHOWN, "a name does not show")

    @pytest.fixture(autouse=True)
    def registered(self, layout, monkeypatch):
        monkeypatch.setitem(families.REGISTRY, self.CONFIG["model_type"], default)


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}


class TestLlama(BestEffort):
    CONFIG = {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 48, **SIZES}
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}


class TestGPT2(BestEffort):
    CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    NATIVE = {
        "embed_tokens": "transformer.wte",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "layers.0.self_attn": "transformer.h.0.attn",
        "layers.0.self_attn.o_proj": "transformer.h.0.attn.c_proj",
        "layers.0.mlp.down_proj": "transformer.h.0.mlp.c_proj",
        "layers.0.mlp.act_fn": "transformer.h.0.mlp.act",
    }
    REFUSES_IN_PLACE = ("self_attn.attention_queries",)


@pytest.mark.slow
class TestGPTNeoX(BestEffort):
    CONFIG = {"model_type": "gpt_neox", "intermediate_size": 48, **SIZES}
    NATIVE = {
        "embed_tokens": "gpt_neox.embed_in",
        "layers": "gpt_neox.layers",
        "norm": "gpt_neox.final_layer_norm",
        "layers.0.self_attn": "gpt_neox.layers.0.attention",
        "layers.0.self_attn.o_proj": "gpt_neox.layers.0.attention.dense",
        "layers.0.mlp.down_proj": "gpt_neox.layers.0.mlp.dense_4h_to_h",
        "layers.0.mlp.act_fn": "gpt_neox.layers.0.mlp.act",
    }


@pytest.mark.slow
class TestPhi(BestEffort):
    CONFIG = {"model_type": "phi", "num_key_value_heads": 2, "intermediate_size": 48, **SIZES}
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.final_layernorm",
        "layers.0.self_attn.o_proj": "model.layers.0.self_attn.dense",
        "layers.0.mlp.down_proj": "model.layers.0.mlp.fc2",
        "layers.0.mlp.act_fn": "model.layers.0.mlp.activation_fn",
    }


@pytest.mark.slow
class TestOPT(BestEffort):
    CONFIG = {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **SIZES}
    NATIVE = {
        "embed_tokens": "model.decoder.embed_tokens",
        "layers": "model.decoder.layers",
        "norm": "model.decoder.final_layer_norm",
        "layers.0.self_attn.o_proj": "model.decoder.layers.0.self_attn.out_proj",
        "layers.0.mlp": None,
    }
    EXPECTED_UNAVAILABLE = {**BestEffort.EXPECTED_UNAVAILABLE, "mlp_input": "no mlp module"}
