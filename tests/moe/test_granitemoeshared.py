"""GraniteMoeShared: multipliers, and the shared expert a child of the block, or none."""

from nnterp.testing import MixtureSuite, Site


def block_of(call):
    """The block whose mixture was called."""
    return next(block for block in call.model.model.layers if block.block_sparse_moe is call.module)


def shared(call):
    """What the shared expert makes of what the mixture was called with."""
    block = block_of(call)
    return 0 if block.shared_mlp is None else block.shared_mlp(call.args[0])


class TestGraniteMoeShared(MixtureSuite):
    FAMILY = "granitemoeshared"
    CONFIG = {
        "model_type": "granitemoeshared",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "max_position_embeddings": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    }
    NATIVE = {
        "embed_tokens": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "layers.0.mlp": "model.layers.0.block_sparse_moe",
    }
    EXPECTED_UNAVAILABLE = {"mlp.mlp_activation": "inside its experts", "mlp.mlp_neurons": "inside its experts"}
    SITES = {
        "mlp_input": Site("post_attention_layernorm"),
        "self_attn.attention_output": Site(
            "self_attn",
            read=lambda call, tensor: tensor * call.model.config.residual_multiplier,
            write=lambda call, tensor, value: value / call.model.config.residual_multiplier,
        ),
        "mlp.mlp_output": Site(
            "mlp",
            read=lambda call, tensor: (tensor + shared(call)) * call.model.config.residual_multiplier,
            write=lambda call, tensor, value: value / call.model.config.residual_multiplier - shared(call),
        ),
    }
    ROUTER = "router"
    EXPERT_WIDTH_KEY = "intermediate_size"
    LAYOUTS = {
        "shared": {},
        "no_shared": {
            "config": {"shared_intermediate_size": 0},
            "EXPECTED_UNAVAILABLE": MixtureSuite.EXPECTED_UNAVAILABLE,
        },
    }

    def rest_of_block(self, block, mid):
        normed = block("post_attention_layernorm")(mid)
        term = block("mlp")(normed)
        if self.layout_name == "shared":
            term = term + block("shared_mlp")(normed)
        return mid + term * self.bare.config.residual_multiplier

    def mixture_sum(self, routed, shared):
        return super().mixture_sum(routed, shared) * self.bare.config.residual_multiplier

    def shared_site(self, mixture):
        block = next(block for block in self.bare.model.layers if block.block_sparse_moe is mixture)
        return None if block.shared_mlp is None else (block.shared_mlp, Site(""))
