"""CLIP's tower: pre-norm blocks behind a class token; its final norm is over that token alone."""

from transformers.models.clip import modeling_clip as modeling

from nnterp import components

#: Names in a block, the same in SigLIP's and those made after it.
BLOCK = {
    "layer_norm1": "input_layernorm",
    "layer_norm2": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "mlp.activation_fn": "mlp.act_fn",
    "mlp.fc2": "mlp.down_proj",
}


def names(tower: str) -> dict[str, str]:
    """``RENAME`` of a wrapper that has the tower at path ``tower``."""
    return {
        tower: "vision",
        f"{tower}.embeddings.patch_embedding": f"{tower}.patch_embed",
        f"{tower}.encoder.layers": f"{tower}.layers",
        **BLOCK,
    }


class Vision(components.Vision):
    """CLIP's tower: one row per image, the class token before its patches."""

    CLASS_TOKENS = 1


class Layer(components.VisionLayer):
    """CLIP's block."""


class Attention(components.VisionAttention):
    """CLIP's attention."""


class Mlp(components.VisionMlp):
    """CLIP's feed-forward."""


ENVOYS = {
    modeling.CLIPVisionModel: Vision,
    modeling.CLIPEncoderLayer: Layer,
    modeling.CLIPAttention: Attention,
    modeling.CLIPMLP: Mlp,
}
