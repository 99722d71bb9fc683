"""LongCat-Flash: two attentions and two MLPs in a block, and a mixture that skips over the second half.

A block hands its stream through ``self_attn[0]``, ``mlps[0]``, ``self_attn[1]`` and ``mlps[1]``. The mixture, `mlp`, is
called with what ``mlps[0]`` is called with, and its output is added at the end of the block::

    layer_output = layer_input + self_attn[0].attention_output + mlps[0].mlp_output
                               + self_attn[1].attention_output + mlps[1].mlp_output + mlp.mlp_output

What there are two of has no value under the single name; the two are ``self_attn[0]`` and ``self_attn[1]``, in
``support()`` as ``self_attn.0`` and ``self_attn.1``.
"""

from typing import Any

from torch import Tensor
from transformers.models.longcat_flash import modeling_longcat_flash as modeling

from nnterp import components
from nnterp.components import EProperty, Residual
from nnterp_families_moe.deepseek_v3 import head_dim, qk_head_dim

__all__ = ["ENVOYS", "RENAME", "Attention", "Layer", "Mlp", "Moe", "Router", "head_dim", "qk_head_dim"]

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """LongCat-Flash's block."""

    TAPS = {
        "layer_mid_0": components.sum_of("residual", "hidden_states", 0),
        "mixture_input": components.apart(components.argument("mlp")),
        "layer_half": components.sum_of("residual", "hidden_states", 1),
        "layer_mid_1": components.sum_of("residual", "hidden_states", 2),
    }
    attention_norm_output = components.unavailable(
        "the block has two attentions: input_layernorm[0].output and input_layernorm[1].output are what they read"
    )
    layer_mid = components.unavailable(
        "the block has two attentions and two MLPs in turn: layer_mid_0, layer_half and layer_mid_1 lie between them"
    )
    mlp_norm_output = components.unavailable(
        "the block norms its stream before each of two MLPs: post_attention_layernorm[0].output, which the mixture "
        "reads as well, and post_attention_layernorm[1].output"
    )

    # A tensor of its own, which is not also what the first MLP is called with.
    mlp_input = components.Layer.mlp_input.at("mixture_input")

    @EProperty(description="The residual stream between the first attention and the first MLP")
    def layer_mid_0(self, value: Tensor) -> Residual:
        """``layer_input + self_attn[0].attention_output``, ``[batch, seq, hidden_size]``.

        An edit, in place or assigned, changes the stream: what is added to, and what everything after it receives.
        """
        return value

    @EProperty(description="The residual stream between the two halves of the block")
    def layer_half(self, value: Tensor) -> Residual:
        """``layer_mid_0 + mlps[0].mlp_output``, ``[batch, seq, hidden_size]``; edits as of `layer_mid_0`."""
        return value

    @EProperty(description="The residual stream between the second attention and the second MLP")
    def layer_mid_1(self, value: Tensor) -> Residual:
        """``layer_half + self_attn[1].attention_output``, ``[batch, seq, hidden_size]``; edits as of `layer_mid_0`."""
        return value


class Attention(components.Attention):
    """One of a block's two latent attentions: keys and values are expanded to every head before they are mixed."""


class Mlp(components.Mlp):
    """One of a block's two dense gated feed-forwards."""


class Router(components.Router):
    """LongCat-Flash's router; a method of its own adds the bias and chooses."""

    METHODS = {"get_topk_indices": {"choice_scores": components.assigned("scores_for_choice", 0)}}


class Moe(components.BiasedMoe):
    """LongCat-Flash's mixture. The last ``zero_expert_num`` of the experts it routes to are identities.

    An identity adds its weight times what the mixture is called with. `num_experts`, the logits and the indices count
    it, and `expert_output` of one is the hidden state itself.
    """

    SCORING = "softmax"

    @property
    def num_experts(self) -> int:
        """The experts that the router scores, identities included."""
        return self._module.router.n_routed_experts

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        if expert >= experts.num_routed_experts:
            return tokens.clone()
        return components.gated_expert(tokens, experts.gate_up_proj[expert], experts.down_proj[expert], experts.act_fn)


ENVOYS = {
    modeling.LongcatFlashDecoderLayer: Layer,
    modeling.LongcatFlashMLA: Attention,
    modeling.LongcatFlashMLP: Mlp,
    modeling.LongcatFlashMoE: Moe,
    modeling.LongcatFlashTopkRouter: Router,
}
