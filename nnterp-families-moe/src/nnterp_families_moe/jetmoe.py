"""JetMoE: a token chooses experts twice, for its attention and for its MLP.

An expert of the attention is a query and an output projection; keys and values are everyone's. A router hands on its
tokens grouped by expert, so its choice is served where it is made, before it groups them.
"""

from typing import Any

from torch import Tensor
from transformers.models.jetmoe import modeling_jetmoe as modeling

from nnterp import components

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "self_attention": "self_attn",
}


class Router(components.Router):
    """JetMoE's router. How many tokens an expert gets is counted anew, since a trace may send one there twice."""

    TAPS = {
        "router_logits": components.assigned("logits", 0),
        "routing": components.assigned(("top_k_indices", "top_k_gates"), 0),
        "load": components.recomputed("expert_size", "top_k_indices.flatten().bincount(minlength=self.num_experts)", 0),
    }


class Layer(components.Layer):
    """JetMoE's block."""


class Attention(components.Attention):
    """JetMoE's attention: slot ``j`` of a token gives its ``j``-th group of ``num_kv_heads`` query heads.

    `router_logits`, `expert_weights` and `expert_indices` are its own router's, as on a mixture. Keys and values are
    repeated for the slots behind the cache, so they are served with ``num_heads`` heads, and no edit stays in it.
    """

    TAPS = components.Moe.TAPS  # how its tokens lie, for what its router holds token by token
    router_logits = components.Moe.router_logits.at("experts.router.router_logits", unavailable=None)
    expert_weights = components.Moe.expert_weights.at("experts.router.routing", select=1, unavailable=None)
    expert_indices = components.Moe.expert_indices.at("experts.router.routing", select=0, unavailable=None)
    attention_premix = components.unavailable(
        "each expert has an output projection of its own: attention_head_outputs is what enters them"
    )

    @property
    def num_experts(self) -> int:
        """Experts of this attention."""
        return self._module.experts.num_experts

    @property
    def top_k(self) -> int:
        """Experts that each token attends with."""
        return self._module.top_k


class Moe(components.Moe):
    """JetMoE's mixture; ``mlp_output`` is its `routed_output` and a bias. Its experts are in no module of their own.

    It runs the slots in the order of their experts; ``_`` is that order in its forward.
    """

    SCORING = "topk_softmax"
    TAPS = {
        **components.Moe.TAPS,
        "by_slot": components.recomputed(
            "expert_outputs", "expert_outputs[_.argsort()].unflatten(0, (-1, self.router.top_k))", 1
        ),
        "expert_outputs": components.assigned("expert_outputs", 2),
        "by_expert": components.recomputed("expert_outputs", "expert_outputs.flatten(0, 1)[_]", 3),
        "routed_output": components.assigned("layer_output", 1),
    }
    expert_weights = components.Moe.expert_weights.at("router.routing", select=1)
    expert_indices = components.Moe.expert_indices.at("router.routing", select=0)
    expert_outputs = components.Moe.expert_outputs.at("expert_outputs")
    routed_output = components.Moe.routed_output.at("routed_output")

    @property
    def intermediate_size(self) -> int:
        """Width of one expert's hidden layer, which the module calls its ``hidden_size``."""
        return self._module.hidden_size

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        entering, leaving = experts.input_linear.weight[expert], experts.output_linear.weight[expert]
        return components.gated_expert(tokens, entering, leaving, experts.activation)


ENVOYS = {
    modeling.JetMoeDecoderLayer: Layer,
    modeling.JetMoeAttention: Attention,
    modeling.JetMoeMoE: Moe,
    modeling.JetMoeTopKGating: Router,
}
