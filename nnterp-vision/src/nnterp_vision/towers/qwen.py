"""Qwen's tower: images of any resolution, packed into one row of patches; its last module, a merger, is the projector.

The tower's tensors are ``[patches, width]`` and are served as one row. Patches lie in merge blocks, squares of
``spatial_merge_size`` a side that become one image token each: the blocks row by row, and the patches of each too.
Qwen2.5-VL takes the blocks window by window instead, until its merger has run. A video's frames are images of one row.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from nnterp import components


def names(tower: str) -> dict[str, str]:
    """``RENAME`` of a wrapper that has the tower at path ``tower``."""
    return {
        tower: "vision",
        f"{tower}.blocks": f"{tower}.layers",
        f"{tower}.merger": "projector",
        "norm1": "input_layernorm",
        "attn": "self_attn",
        "attn.proj": "attn.o_proj",
        "norm2": "post_attention_layernorm",
    }


class Vision(components.Vision):
    """Qwen's tower.

    `tower_output` is the stream that leaves the last block, in which the patches still are what they were; the merger
    reads it. A value of the interior of its attentions that belongs to one image at a time is unavailable.
    """

    FLAT = True
    PACKED = True
    VARIABLE = True
    TAPS = components.grid("[size[1:] for size in grid_thw.tolist() for _ in range(size[0])]")

    @property
    def num_heads(self) -> int:
        """Heads of the tower's attentions."""
        return self._module.config.num_heads

    @property
    def spatial_merge_size(self) -> int:
        """Side of the square of patches that becomes one image token, in patches."""
        return self._module.config.spatial_merge_size

    @property
    def window_size(self) -> int | None:
        """Side in pixels of the windows that most blocks attend within; None on a tower without windows."""
        return None

    @components.EProperty("patch_embed.output", description="The patch embedding's output, one row per patch")
    def patch_embeddings(self, value: Tensor) -> components.Patches:
        """The patch embedding's output, ``[images, patches, vision_hidden_size]``: one row, where images are packed.

        Before positions, in the order of the blocks. In-place edits and assignment reach the tower.
        """
        return value

    patch_embeddings = components.per_patch(patch_embeddings)

    def rows_of_images(self, values: Tensor, grid: Any) -> list[Tensor] | None:
        whole = all(side % self.spatial_merge_size == 0 for shape in grid for side in shape)
        return components.Vision.rows_of_images(self, values, grid) if whole else None

    def arranged(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        side = self.spatial_merge_size
        merged = (shape[0] // side, shape[1] // side)
        blocks = values.unflatten(0, (-1, side, side))[self.raster(merged).to(values.device)]
        return blocks.unflatten(0, merged).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def raster(self, merged: tuple[int, int]) -> Tensor:
        """Where in the tower's order each merge block is, for the blocks row by row."""
        return torch.arange(merged[0] * merged[1])


class Qwen2Vision(Vision):
    """Qwen2-VL's tower. Its config calls the tower's width ``embed_dim`` and the text's ``hidden_size``."""

    @property
    def vision_hidden_size(self) -> int:
        """Width of the tower's stream."""
        return self._module.config.embed_dim

    @property
    def intermediate_size(self) -> int:
        """Width of the tower's MLPs."""
        return int(self.vision_hidden_size * self._module.config.mlp_ratio)


class WindowVision(Vision):
    """Qwen2.5-VL's tower: most blocks attend within windows, and patches lie window by window in all of them.

    The projector's output is in that order too; `image_features` are in that of the tokens, row by row.
    """

    TAPS = {**Vision.TAPS, "patches": components.result("permute_input_for_window_attn")}
    patch_embeddings = Vision.patch_embeddings.at("patches")

    @property
    def window_size(self) -> int:
        """Side in pixels of the windows that blocks outside ``fullatt_block_indexes`` attend within."""
        return self._module.config.window_size

    def raster(self, merged: tuple[int, int]) -> Tensor:
        side = self.window_size // self.spatial_merge_size // self.patch_size
        index = torch.arange(merged[0] * merged[1]).view(merged)
        windows = [
            index[top : top + side, left : left + side].flatten()
            for top in range(0, merged[0], side)
            for left in range(0, merged[1], side)
        ]
        return torch.cat(windows).argsort()


class DeepstackVision(Vision):
    """Qwen3-VL's tower. Inner blocks reach the text too, through ``deepstack_merger_list``, behind its first blocks."""

    image_features = components.Vision.image_features.at()
    image_features.__doc__ = f"""{image_features.__doc__.rstrip()}

        The image reaches the text by ``layers[k].deepstack_output`` too: setting these features to zero does not remove
        it.
        """


class Layer(components.VisionLayer):
    """A block of Qwen's tower."""


class Attention(components.PerImageAttention):
    """Qwen's attention of the tower.

    Its values are views of one projection, which torch refuses to edit in place under autograd: assign there.
    """

    TAPS = {
        "packed_inputs": components.assigned(("query_states", "key_states", "value_states")),
        "packed_outputs": components.assigned("attn_output", occurrence=0),
    }


class Mlp(components.VisionMlp):
    """Qwen's feed-forward of the tower."""


QWEN2 = {
    modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel: Qwen2Vision,
    modeling_qwen2_vl.Qwen2VLVisionBlock: Layer,
    modeling_qwen2_vl.VisionAttention: Attention,
    modeling_qwen2_vl.VisionMlp: Mlp,
}
QWEN2_5 = {
    modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel: WindowVision,
    modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock: Layer,
    modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention: Attention,
    modeling_qwen2_5_vl.Qwen2_5_VLMLP: Mlp,
}
QWEN3 = {
    modeling_qwen3_vl.Qwen3VLVisionModel: DeepstackVision,
    modeling_qwen3_vl.Qwen3VLVisionBlock: Layer,
    modeling_qwen3_vl.Qwen3VLVisionAttention: Attention,
    modeling_qwen3_vl.Qwen3VLVisionMLP: Mlp,
}
