"""Pixtral's tower: images of any resolution, packed into one row whose pattern is zero from one image to another."""

from torch import Tensor
from transformers.models.pixtral import modeling_pixtral as modeling

from nnterp import components


def names(tower: str) -> dict[str, str]:
    """``RENAME`` of a wrapper that has the tower at path ``tower``."""
    return {
        tower: "vision",
        f"{tower}.patch_conv": f"{tower}.patch_embed",
        f"{tower}.transformer.layers": f"{tower}.layers",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
    }


class Vision(components.Vision):
    """Pixtral's tower: one row with the patches of all images, in their order. It has no norm behind the last block."""

    PACKED = True
    VARIABLE = True
    TAPS = components.grid(
        "[[side // self.patch_size for side in size] for size in "
        "(image_sizes if image_sizes is not None else [pixel_values.shape[-2:]] * len(pixel_values))]"
    )

    @components.EProperty("ln_pre.input", description="The patch embedding's output, one row per patch")
    def patch_embeddings(self, value: Tensor) -> components.Patches:
        """The patch embedding's output, ``[images, patches, vision_hidden_size]``: one row, where images are packed.

        Before the tower's own norm and positions. In-place edits and assignment reach the tower.
        """
        return value


class Layer(components.VisionLayer):
    """Pixtral's block."""


class Attention(components.VisionAttention):
    """Pixtral's attention, one call for all images under a mask that keeps them apart."""


class Mlp(components.VisionMlp):
    """Pixtral's gated feed-forward."""


ENVOYS = {
    modeling.PixtralVisionModel: Vision,
    modeling.PixtralAttentionLayer: Layer,
    modeling.PixtralAttention: Attention,
    modeling.PixtralMLP: Mlp,
}
