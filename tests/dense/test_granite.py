"""Granite: multipliers on the embeddings, the scores, what each sublayer adds, and the logits."""

from nnterp.testing import FamilySuite, Site


def scaled(module: str) -> Site:
    """What ``module`` returns times ``residual_multiplier``: the term the block adds."""
    return Site(
        module,
        read=lambda call, tensor: tensor * call.model.config.residual_multiplier,
        write=lambda call, tensor, value: value / call.model.config.residual_multiplier,
    )


class TestGranite(FamilySuite):
    FAMILY = "granite"
    CONFIG = {
        "model_type": "granite",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    }
    NATIVE = {"embed_tokens": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm"}
    SITES = {"self_attn.attention_output": scaled("self_attn"), "mlp.mlp_output": scaled("mlp")}
    LAYOUTS = {"scaled": {}}

    def rest_of_block(self, block, mid):
        term = block("mlp")(block("post_attention_layernorm")(mid))
        return mid + term * self.bare.config.residual_multiplier
