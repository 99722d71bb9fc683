"""Mamba-2: fused blocks of one mixer, whose scan is inside one operation."""

from nnterp.testing import Site
from nnterp_vllm.testing import EngineSuite

ONE_SUBLAYER = dict.fromkeys(("layer_mid", "mlp_norm_output", "mlp_input"), "one mixer on the stream")
IN_KERNEL = dict.fromkeys(
    [
        f"linear_attn.{name}"
        for name in (
            "attention_queries",
            "attention_keys",
            "attention_values",
            "betas",
            "decays",
            "state_input",
            "state",
            "states",
            "state_output",
            "effective_attention",
        )
    ],
    "inside the engine's kernel",
)


class TestMamba2(EngineSuite):
    FAMILY = "mamba2"
    CONFIG = {
        "model_type": "mamba2",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,  # with more, vLLM norms each group and transformers all together
        "conv_kernel": 4,
        "chunk_size": 8,
        "time_step_rank": 4,
    }
    NATIVE = {
        "embed_tokens": "backbone.embeddings",
        "layers": "backbone.layers",
        "norm": "backbone.norm_f",
        "layers.0.input_layernorm": "backbone.layers.0.norm",
        "layers.0.linear_attn": "backbone.layers.0.mixer",
    }
    EXPECTED_UNAVAILABLE = {**ONE_SUBLAYER, **IN_KERNEL}
    ATTENTIONS = ()
    MLPS = ()
    SITES = {
        "linear_attn.attention_output": Site("linear_attn"),
        "linear_attn.attention_head_outputs": Site(
            "linear_attn.norm",
            "input",
            read=lambda call, scanned: scanned.unflatten(-1, (8, 32)),
            write=lambda call, scanned, value: value.flatten(-2),
        ),
    }
    SIZES = {"linear_attn.heads": 8, "linear_attn.head_dim": 32, "linear_attn.state_dim": 16}

    @classmethod
    def roles(cls):
        return {"": "Layer", "linear_attn": "StateSpace"}

    def contributions(self):
        return ["linear_attn.attention_output"]
