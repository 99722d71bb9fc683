"""Llama 4: mixtures that weight what an expert is called with, among dense blocks where the config says.

Attention is chunked and rotary, with normed queries and keys, but in some blocks full, without position, its queries
scaled by where they stand.
"""

from typing import Any

from torch import Tensor
from transformers.models.llama4 import modeling_llama4 as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "feed_forward": "mlp",
    "shared_expert": "shared_experts",
    "activation_fn": "act_fn",
}


class Layer(components.Layer):
    """Llama 4's block."""

    TAPS = {**components.Layer.TAPS, "mlp_term": components.result("view")}


class Attention(components.Attention):
    """Llama 4's attention. Where it scales queries by their place in the row, transformers counts the padding too."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Router(components.Router):
    """Llama 4's router, which scores each expert that a token was not routed to with zero."""

    TAPS = {
        **components.Router.TAPS,
        "expert_indices": components.assigned("router_indices", 0),
        "expert_input_weights": components.assigned("router_scores", 1),
    }


class DistinctExperts(components.ExpertChoice):
    """Experts of which a token can take each once."""

    def check(self, obj: Any, value: Any, replaced: Any) -> None:
        super().check(obj, value, replaced)
        ordered = value.sort(-1).values
        if value.shape[-1] > 1 and (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError(
                f"{self.name} of {obj.path}: a token takes an expert once here, and one was assigned to several of its "
                f"slots (top_k)"
            )


class Moe(components.Moe):
    """Llama 4's mixture: every expert runs on every token, weighted before it runs (`expert_input_weights`).

    The routed experts are added to the shared expert's output in place; while traced they are not.
    """

    SCORING = "sigmoid"
    CONTRIBUTION = "../mlp_term"
    TAPS = {
        **components.Moe.TAPS,
        "routed_output": components.argument("add_"),
        "sum": components.out_of_place("out"),
    }
    routed_output = components.Moe.routed_output.at("routed_output")
    expert_weights = components.unavailable(
        "its weights multiply what an expert is called with, not what it returns: expert_input_weights"
    )

    @DistinctExperts("router.expert_indices", "The expert of each routing slot")
    def expert_indices(self, value: Tensor) -> components.ExpertIndices:
        """The expert of each slot, ``[batch, seq, top_k]``, int64.

        Write another to reroute the slot; it keeps the weight that the router gave the expert it chose. A token takes
        an expert once: assigning one to two slots of a token raises ValueError, and of two written in place one counts.
        """
        return value

    @components.TokenEProperty("router.expert_input_weights", "What multiplies each expert's input")
    def expert_input_weights(self, value: Tensor) -> components.RouterLogits:
        """What multiplies each expert's input, ``[batch, seq, num_experts]``: the sigmoid of its logit, zero where the
        token was not routed to it.

        Zero ``[b, t, e]`` to remove expert ``e`` from token ``t``, which then adds exactly nothing; a number where
        there was zero routes the token there as well. In-place edits and assignment reach the model.
        """
        return value

    def expert_output(self, expert: int, hidden: Tensor) -> Tensor:
        """What expert ``expert`` alone makes of ``hidden``, ``[..., hidden_size]``, before any routing weight.

        What the mixture adds for it is ``expert_output(expert, weight * mlp_input)``, with the expert's column of
        `expert_input_weights`. Raises ValueError for an expert there is not.
        """
        return super().expert_output(expert, hidden)

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        return components.gated_expert(
            tokens, experts.gate_up_proj[expert].T, experts.down_proj[expert].T, experts.act_fn
        )


ENVOYS = {
    modeling.Llama4TextDecoderLayer: Layer,
    modeling.Llama4TextAttention: Attention,
    modeling.Llama4TextMLP: Mlp,
    modeling.Llama4TextMoe: Moe,
    modeling.Llama4Router: Router,
}


def intermediate_size(model) -> int:
    """Width of a dense block's MLP."""
    return text_config(model).intermediate_size_mlp
