"""MPT: an MLP that adds the residual itself, ALiBi, chunks of one clipped projection, float32 scores."""

import torch

from nnterp.testing import FamilySuite, Forward, Site


class MptForward(Forward):
    def forward(self, at, module, hidden, position_bias, attention_mask=None, cache=None, past_key_values=None):
        fused = module.Wqkv(hidden)
        if module.clip_qkv:
            fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in fused.chunk(3, -1))
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        alibi = position_bias[:, -1:, -key.shape[-2] :]
        heads, pattern = self(at, module, query, key, value, attention_mask, module.softmax_scale, alibi=alibi)
        return module.out_proj(heads.flatten(-2)), pattern

    def scores(self, module, query, key, mask, scaling, alibi):
        scores = super().scores(module, query, key, alibi, scaling)
        return scores.masked_fill(mask, torch.finfo(query.dtype).min)


class TestMpt(FamilySuite):
    FAMILY = "mpt"
    CONFIG = {"model_type": "mpt", "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}
    NATIVE = {
        "embed_tokens": "transformer.wte",
        "layers": "transformer.blocks",
        "norm": "transformer.norm_f",
        "layers.0.input_layernorm": "transformer.blocks.0.norm_1",
        "layers.0.self_attn": "transformer.blocks.0.attn",
        "layers.0.self_attn.o_proj": "transformer.blocks.0.attn.out_proj",
        "layers.0.post_attention_layernorm": "transformer.blocks.0.norm_2",
        "layers.0.mlp": "transformer.blocks.0.ffn",
        "layers.0.mlp.act_fn": "transformer.blocks.0.ffn.act",
    }
    SITES = {"mlp.mlp_output": Site("mlp.down_proj")}
    REFUSES_IN_PLACE = tuple(f"self_attn.attention_{part}" for part in ("queries", "keys", "values"))
    FORMULA = MptForward()
    SDPA = False
    LAYOUTS = {
        "default": {},
        "clipped": {"config": {"d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}},
    }

    def rest_of_block(self, block, mid):
        return block("mlp")(block("post_attention_layernorm")(mid), mid)
