"""Falcon: 7B, 40B and RW blocks, rotary positions and ALiBi, eager attention and torch's SDPA."""

import copy
import math

import torch
from transformers import AutoModelForCausalLM

from nnterp import StandardizedTransformer
from nnterp.families import falcon
from nnterp.testing import FamilySuite, Forward, Site, checkpoint
from nnterp.testing.comparing import assert_close

EAGER_ONLY = {f"self_attn.attention_{part}": 'attn_implementation="eager"' for part in ("scores", "probabilities")}
PARALLEL = {"layer_mid": "parallel"}


class FalconForward(Forward):
    def forward(self, at, module, hidden, alibi, attention_mask, layer_past=None, position_embeddings=None, **options):
        query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
        if alibi is None:
            query, key = falcon.modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, module.layer_idx)
        heads, pattern = self(at, module, query, key, value, attention_mask, alibi=alibi)
        return module.dense(heads.flatten(-2)), pattern

    def scores(self, module, query, key, mask, scaling, alibi):
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        scores = query @ key.transpose(-1, -2)
        if alibi is not None and module.config._attn_implementation == "eager":  # which adds what the mask has already
            scores = scores.float() + alibi.view(query.shape[0], module.num_heads, 1, -1)
        return scores / math.sqrt(query.shape[-1]) + mask

    def pattern(self, module, scores):
        return torch.softmax(scores, dim=-1, dtype=module.dense.weight.dtype)


class TestFalcon(FamilySuite):
    FAMILY = "falcon"
    CONFIG = {
        "model_type": "falcon",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 64,
    }
    NATIVE = {
        "layers.0.post_attention_layernorm": None,
        "embed_tokens": "transformer.word_embeddings",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "layers.0.self_attn": "transformer.h.0.self_attention",
        "layers.0.self_attn.o_proj": "transformer.h.0.self_attention.dense",
        "layers.0.mlp.act_fn": "transformer.h.0.mlp.act",
        "layers.0.mlp.down_proj": "transformer.h.0.mlp.dense_4h_to_h",
    }
    EXPECTED_UNAVAILABLE = PARALLEL
    SITES = {"mlp_norm_output": Site("input_layernorm")}
    FORMULA = FalconForward()
    LAYOUTS = {
        "7b": {},
        "alibi": {"config": {"alibi": True}, "SDPA": False},
    }


class TestFalconRW(TestFalcon):
    """Sequential blocks, a key head for every query head, biases, ALiBi."""

    CONFIG = {**TestFalcon.CONFIG, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    NATIVE = {name: path for name, path in TestFalcon.NATIVE.items() if path is not None}
    SITES = {}
    EXPECTED_UNAVAILABLE = {}
    SDPA = False  # adds the bias once where the eager forward adds it twice: compared with the bare model below
    LAYOUTS = {"rw": {}, "rw_sdpa": {"load": {"attn_implementation": "sdpa"}, "EXPECTED_UNAVAILABLE": EAGER_ONLY}}


class TestFalcon40B(TestFalcon):
    """The new decoder architecture: keys and values are repeated for the query heads before they are cached."""

    CONFIG = {**TestFalcon.CONFIG, "new_decoder_architecture": True, "num_kv_heads": 2}
    NATIVE = {
        **TestFalcon.NATIVE,
        "layers.0.input_layernorm": "transformer.h.0.ln_attn",
        "layers.0.post_attention_layernorm": "transformer.h.0.ln_mlp",
    }
    SITES = {}
    OWN_SIZES = {f"self_attn.attention_{part}": {"num_kv_heads": 4} for part in ("keys", "values")}
    LAYOUTS = {
        "40b": {},
        "11b": {
            "config": {"num_ln_in_parallel_attn": 1},
            "NATIVE": TestFalcon.NATIVE,
            "SITES": TestFalcon.SITES,
        },
    }


def test_flash_attention(monkeypatch):
    """The class that FlashAttention is called from serves what it is called with, in the standard layout."""
    config = checkpoint.config(**TestFalcon.CONFIG)
    plain = checkpoint.randomized(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")).eval()
    flash = copy.deepcopy(plain)
    for index, block in enumerate(flash.transformer.h):
        attention = falcon.modeling.FalconFlashAttention2(flash.config, index)
        attention.load_state_dict(block.self_attention.state_dict())
        block.self_attention = attention

    def causal(query, key, value, *args, **options):
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    monkeypatch.setattr(falcon.modeling, "_flash_attention_forward", causal, raising=False)
    ids = torch.arange(12).view(2, 6)
    read = []
    for model in map(StandardizedTransformer, (plain, flash)):
        attention = model.layers[1].self_attn
        with model.trace(ids):
            queries = attention.attention_queries.save()
            keys = attention.attention_keys.save()
            values = attention.attention_values.save()
            heads = attention.attention_head_outputs.save()
            output = attention.attention_output.save()
        read.append((queries, keys, values, heads, output))
        with model.trace(ids):
            attention.attention_keys = attention.attention_keys * 0.5
            read[-1] += (model.logits.save(),)
    for one, other in zip(*read, strict=True):
        assert_close(one, other, 64)
