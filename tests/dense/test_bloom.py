"""BLOOM: sublayers that add the residual themselves, ALiBi, and a residual that is normed."""

from nnterp.testing import FamilySuite, Forward, Site


class BloomForward(Forward):
    def forward(self, at, module, hidden, residual, alibi, attention_mask, layer_past=None, **options):
        fused = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, -1))
        query, key, value = (fused[..., i, :].transpose(1, 2) for i in range(3))
        if layer_past is not None:
            key, value = layer_past.update(key, value, module.layer_idx)
        alibi = alibi.unflatten(0, (-1, module.num_heads))
        heads, pattern = self(at, module, query, key, value, attention_mask, alibi=alibi)
        return module.dense(heads.flatten(-2)) + residual, pattern

    def scores(self, module, query, key, mask, scaling, alibi):
        return super().scores(module, query, key, alibi + mask, scaling)


class TestBloom(FamilySuite):
    FAMILY = "bloom"
    CONFIG = {"model_type": "bloom", "hidden_size": 32, "n_layer": 3, "n_head": 4}
    NATIVE = {
        "embed_tokens": "transformer.word_embeddings",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "layers.0.self_attn": "transformer.h.0.self_attention",
        "layers.0.self_attn.o_proj": "transformer.h.0.self_attention.dense",
        "layers.0.mlp.act_fn": "transformer.h.0.mlp.gelu_impl",
        "layers.0.mlp.down_proj": "transformer.h.0.mlp.dense_4h_to_h",
    }
    SITES = {"self_attn.attention_output": Site("self_attn.o_proj"), "mlp.mlp_output": Site("mlp.down_proj")}
    FORMULA = BloomForward()
    SDPA = False

    def rest_of_block(self, block, mid):
        return block("mlp")(block("post_attention_layernorm")(mid), mid)


class TestBloomNormedResidual(TestBloom):
    """Each sublayer adds to its norm's output, not to the stream."""

    SITES = {**TestBloom.SITES, "mlp_input": Site("mlp", "input", read=lambda call, tensor: tensor.clone())}
    LAYOUTS = {"normed_residual": {"config": {"apply_residual_connection_post_layernorm": True}}}

    def rest_of_block(self, block, mid):
        normed = block("post_attention_layernorm")(mid)
        return block("mlp")(normed, normed)

    def mid_sum(self, block_values):
        return block_values("attention_norm_output") + block_values("self_attn.attention_output")

    def contribution_sum(self, block_values):
        return block_values("mlp_norm_output") + block_values("mlp.mlp_output")
