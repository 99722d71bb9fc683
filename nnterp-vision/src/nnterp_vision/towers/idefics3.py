"""Idefics 3's tower: SigLIP's blocks, under a mask of the patches that padding leaves out."""

import math
from typing import Any

from torch import Tensor
from transformers.models.idefics3 import modeling_idefics3 as modeling

from nnterp import components


class Vision(components.Vision):
    """Idefics 3's tower: a row is a crop of an image, or the whole image at the size of a crop.

    Rows of one call have one size, and an image that is smaller lies at the top left of its row. `grid` is of the
    patches that its mask shows; the blocks have the others too, to which no patch attends.
    """

    NORM = "post_layernorm"
    TAPS = components.grid(
        "[[side // self.patch_size for side in pixel_values.shape[-2:]]] * len(pixel_values) "
        "if patch_attention_mask is None else "
        "zip(patch_attention_mask[:, :, 0].sum(1), patch_attention_mask[:, 0].sum(1))"
    )

    def usual_grid(self, values: Tensor) -> None:
        """None: which patches are padding is in the mask alone."""
        return None

    def rows_of_images(self, values: Tensor, grid: Any) -> list[Tensor] | None:
        frame = framed(grid, values.shape[1]) if len(values) == len(grid) else None
        if frame is None:
            return None
        laid = values.unflatten(1, frame)
        return [row[:high, :wide].flatten(0, 1) for row, (high, wide) in zip(laid, grid, strict=True)]


def framed(grid: Any, positions: int) -> tuple[int, int] | None:
    """Rows and columns of the frame of so many ``positions`` that each image of ``grid`` is at the top left of.

    A processor pads to the largest image; a larger frame is a square, as the projector takes no other.
    """
    most = max(rows for rows, _ in grid), max(columns for _, columns in grid)
    side = math.isqrt(positions)
    if most[0] * most[1] == positions:
        return most
    return (side, side) if side * side == positions and max(most) <= side else None


class Layer(components.VisionLayer):
    """Idefics 3's block of the tower."""


class Attention(components.VisionAttention):
    """Idefics 3's attention of the tower."""


class Mlp(components.VisionMlp):
    """Idefics 3's feed-forward of the tower."""


ENVOYS = {
    modeling.Idefics3VisionTransformer: Vision,
    modeling.Idefics3EncoderLayer: Layer,
    modeling.Idefics3VisionAttention: Attention,
    modeling.Idefics3VisionMLP: Mlp,
}
