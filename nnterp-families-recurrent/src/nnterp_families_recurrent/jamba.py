"""Jamba: selective scans with an attention among them, and a mixture in place of every few feed-forwards.

Attention has no positions: the scans know the order. The scan norms its step size, keys and queries, which are served
as it receives them. With ``mamba_proj_bias`` the short convolution takes in what the bias makes of left padding, as in
Falcon-Mamba.
"""

from transformers.models.jamba import modeling_jamba as modeling

from nnterp import components
from nnterp.components import Standard

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.final_layernorm": "norm",
    "mamba": "linear_attn",
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
}


class Layer(components.Layer):
    """Jamba's block, with an attention or with a scan."""


class Attention(components.Attention):
    """Jamba's attention."""


class SelectiveScan(components.SelectiveScan):
    """Jamba's scan."""


class Mlp(components.Mlp):
    """A dense block's gated feed-forward."""


class Moe(components.Moe):
    """Jamba's mixture: softmax over the experts, the weights of the top k as they are.

    Before transformers 5.24.0 its router is a plain linear layer, whose output the logits are.
    """

    router_logits = components.Moe.router_logits.at(
        lambda moe: "router.router_logits" if isinstance(moe.router, Standard) else "router.output"
    )


ENVOYS = {
    modeling.JambaAttentionDecoderLayer: Layer,
    modeling.JambaMambaDecoderLayer: Layer,
    modeling.JambaAttention: Attention,
    modeling.JambaMambaMixer: SelectiveScan,
    modeling.JambaMLP: Mlp,
    modeling.JambaSparseMoeBlock: Moe,
}
if hasattr(modeling, "JambaTopKRouter"):
    ENVOYS[modeling.JambaTopKRouter] = components.Router
