"""OPT: plain blocks without an MLP module, scaled queries, and the 350m layout with norms on the stream."""

from nnterp.testing import Formula, Site
from nnterp_vllm.testing import EngineSuite

POST_NORM = "norms what its sublayers return"


def of_rows(module: str, side: str = "output") -> Site:
    """A value that the bare block has with batch and sequence flattened."""
    return Site(
        module, side, read=lambda call, t: t.unflatten(0, (1, -1)), write=lambda call, t, value: value.flatten(0, 1)
    )


class ScaledQueries(Formula):
    """Queries that are scaled already."""

    def scores(self, module, query, key, mask, scaling, **options):
        assert scaling == 1.0
        return super().scores(module, query, key, mask, scaling)


class TestOPT(EngineSuite):
    FAMILY = "opt"
    CONFIG = {
        "model_type": "opt",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "ffn_dim": 192,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 128,
    }
    NATIVE = {
        "embed_tokens": "model.decoder.embed_tokens",
        "layers": "model.decoder.layers",
        "norm": "model.decoder.final_layer_norm",
        "layers.0.input_layernorm": "model.decoder.layers.0.self_attn_layer_norm",
        "layers.0.post_attention_layernorm": "model.decoder.layers.0.final_layer_norm",
        "layers.0.self_attn.o_proj": "model.decoder.layers.0.self_attn.out_proj",
        "layers.0.mlp": None,
    }
    EXPECTED_UNAVAILABLE = {"mlp_input": "no mlp module"}
    SITES = {
        "layer_mid": of_rows("post_attention_layernorm", "input"),
        "mlp_norm_output": of_rows("post_attention_layernorm"),
        "mlp_neurons": of_rows("fc2", "input"),
        "mlp_output": of_rows("fc2"),
    }
    FORMULA = ScaledQueries()
    SIZES = {"intermediate_size": 192, "self_attn.num_heads": 4, "self_attn.head_dim": 32}

    @classmethod
    def all_values(cls):
        return [*super().all_values(), "mlp_neurons", "mlp_output"]

    def contributions(self):
        return ["self_attn.attention_output", "mlp_output"]

    def rest_of_block(self, block, mid):
        normed = block("post_attention_layernorm")(mid)
        return mid + block("fc2")(block("activation_fn")(block("fc1")(normed)))


class TestOPT350M(TestOPT):
    """Norms on the stream after each sum, no final norm, embeddings narrower than the stream."""

    CONFIG = {**TestOPT.CONFIG, "do_layer_norm_before": False, "word_embed_proj_dim": 64}
    NATIVE = {**TestOPT.NATIVE, "norm": None}
    EXPECTED_UNAVAILABLE = {
        **TestOPT.EXPECTED_UNAVAILABLE,
        "attention_norm_output": POST_NORM,
        "mlp_norm_output": POST_NORM,
        "final_norm_output": "no norm module",
    }
    SITES = {**TestOPT.SITES, "layer_mid": of_rows("fc1", "input")}
    OWN_SIZES = {"token_embeddings": {"hidden_size": 64}}

    def rest_of_block(self, block, mid):
        term = block("fc2")(block("activation_fn")(block("fc1")(mid)))
        return block("post_attention_layernorm")(mid + term)

    def contribution_sum(self, values):
        block = self.module(f"layers.{self.summed}")
        mid = block.self_attn_layer_norm(values("layer_input") + values("self_attn.attention_output"))
        return block.final_layer_norm(mid + values("mlp_output")).detach()

    def bare_lens(self, stream):
        return self.bare.lm_head(self.bare.model.decoder.project_out(stream))
