"""Mllama's tower: blocks over all tiles of an image at once, then a few more whose contributions are gated.

A row is an image: the positions of its tiles one after the other, each a class token, the patches and padding to a
multiple of eight. Tiles that the image does not fill are there too, and masked.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.models.mllama import modeling_mllama as modeling

from nnterp import components


def names(tower: str) -> dict[str, str]:
    """``RENAME`` of a wrapper that has the tower at path ``tower``."""
    return {
        tower: "vision",
        f"{tower}.patch_embedding": f"{tower}.patch_embed",
        f"{tower}.transformer.layers": f"{tower}.layers",
        f"{tower}.global_transformer.layers": f"{tower}.global_layers",
        "mlp.activation_fn": "mlp.act_fn",
        "mlp.fc2": "mlp.down_proj",
    }


class Vision(components.Vision):
    """Mllama's tower.

    The blocks of its first encoder are ``layers``, those of the second ``global_layers``, with the same values.
    `tower_output` is what leaves the last of the second; the projector gets it beside the streams behind some of
    ``layers`` (``intermediate_layers_indices``). `image_features` is what the cross-attention blocks attend to.
    """

    CLASS_TOKENS = 1
    TAPS = components.grid(
        "[[side // self.patch_size for side in pixel_values.shape[-2:]]] * pixel_values.shape[:3].numel()"
    )
    tower_output = components.Vision.tower_output.at(
        lambda vision: f"global_layers.{len(vision.global_layers) - 1}.output"
    )

    @components.EProperty("/projector.output", description="What the cross-attention blocks attend to")
    def image_features(self, value: Tensor) -> components.ImageFeatures:
        """What the cross-attention blocks of the text model attend to, ``[image_tokens, hidden_size]``.

        One vector per position of every tile, padding left out: no token of the prompt stands for it, and no row of the
        text model's stream is it. In-place edits and assignment reach those blocks, and nothing else.
        """
        return value.view(-1, value.shape[-1])

    @image_features.postprocess
    def image_features(self, value: Tensor) -> Tensor:
        tiles = self._module.max_num_tiles
        return value.unflatten(0, (1, -1, tiles, self._module.num_patches))

    def usual_grid(self, values: Tensor) -> Any:
        return components.Vision.usual_grid(self, self.per_tile(values))

    def rows_of_images(self, values: Tensor, grid: Any) -> list[Tensor] | None:
        return components.Vision.rows_of_images(self, self.per_tile(values), grid)

    def per_tile(self, values: Tensor) -> Tensor:
        """``values`` with a row for each tile, without padding; `patch_embeddings` are so already."""
        tiles, positions = self._module.max_num_tiles, self._module.num_patches
        padded = -(-positions // 8) * 8
        if values.dim() < 2 or values.shape[1] != tiles * padded:
            return values
        return values.unflatten(1, (tiles, padded))[:, :, :positions].flatten(0, 1)


def gated(place: str) -> Callable[[Any], str]:
    """Where what a block adds is read: behind its gate ``place``, in the blocks that have one."""
    return lambda envoy: f"../{place}" if envoy.parent._module.is_gated else "output"


class Layer(components.VisionLayer):
    """Mllama's block of the tower; those of the second encoder multiply what they add by the ``tanh`` of a gate."""

    TAPS = {
        **components.VisionLayer.TAPS,
        "attention_term": components.product("gate_attn"),
        "mlp_term": components.product("gate_ffn"),
    }


class Attention(components.VisionAttention):
    """Mllama's attention of the tower."""

    attention_output = components.VisionAttention.attention_output.at(gated("attention_term"))


class Mlp(components.VisionMlp):
    """Mllama's feed-forward of the tower."""

    mlp_output = components.VisionMlp.mlp_output.at(gated("mlp_term"))


ENVOYS = {
    modeling.MllamaVisionModel: Vision,
    modeling.MllamaVisionEncoderLayer: Layer,
    modeling.MllamaVisionAttention: Attention,
    modeling.MllamaVisionMLP: Mlp,
}
