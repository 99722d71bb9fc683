"""Qwen3-MoE on vLLM: fused blocks, mixtures among dense ones where the config says."""

from vllm.model_executor.models import qwen3_moe as modeling

from nnterp_vllm import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "mlp.gate": "mlp.router",  # by its path: the experts hold the gate as well
}


class Layer(components.FusedLayer):
    """Qwen3-MoE's block."""


class Attention(components.Attention):
    """Qwen3-MoE's attention."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.Moe):
    """Qwen3-MoE's mixture."""


ENVOYS = {
    modeling.Qwen3MoeDecoderLayer: Layer,
    modeling.Qwen3MoeAttention: Attention,
    modeling.Qwen3MoeMLP: Mlp,
    modeling.Qwen3MoeSparseMoeBlock: Moe,
}
