"""DBRX: norms and attention in a module of their own, a router of one tensor, experts that only its own loop runs."""

from typing import Any

from torch import Tensor
from transformers.models.dbrx import modeling_dbrx as modeling

from nnterp import components
from nnterp.sizes import text_config

RENAME = {
    "transformer.wte": "embed_tokens",
    "transformer.blocks": "layers",
    "transformer.norm_f": "norm",
    "norm_attn_norm.attn": "self_attn",
    "norm_attn_norm.norm_1": "input_layernorm",
    "norm_attn_norm.norm_2": "post_attention_layernorm",
    "out_proj": "o_proj",
    "ffn": "mlp",
}


class NormAttentionNorm(components.Standard):
    """The first half of DBRX's block, which returns the stream and the MLP's input."""

    TAPS = {"layer_mid": components.stream_before("norm_2")}


class Layer(components.Layer):
    """DBRX's block; the stream between its sublayers is computed in ``norm_attn_norm``."""

    TAPS = {}
    layer_mid = components.Layer.layer_mid.at("norm_attn_norm.layer_mid")


class Attention(components.Attention):
    """DBRX's attention: queries, keys and values are clamped before the rotary embedding."""


class Moe(components.Moe):
    """DBRX's mixture: the chosen weights are normed, and its experts' parameters lie in one matrix each."""

    def _one_expert(self, experts: Any, expert: int, tokens: Tensor) -> Tensor:
        rows = slice(expert * experts.ffn_hidden_size, (expert + 1) * experts.ffn_hidden_size)
        return experts.mlp(tokens, experts.mlp.w1[rows], experts.mlp.v1[rows], experts.mlp.w2[rows])


ENVOYS = {
    modeling.DbrxBlock: Layer,
    modeling.DbrxNormAttentionNorm: NormAttentionNorm,
    modeling.DbrxAttention: Attention,
    modeling.DbrxFFN: Moe,
    modeling.DbrxRouter: components.Router,
}


def num_kv_heads(model) -> int:
    """Key/value heads, which the config keeps with its attention's."""
    return text_config(model).attn_config.kv_n_heads


def intermediate_size(model) -> int:
    """Width of one expert, which the config keeps with its mixture's."""
    return text_config(model).ffn_config.ffn_hidden_size
