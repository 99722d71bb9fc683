"""DeepStack: features of the image that a text model adds to its stream behind some of its blocks.

They come from inner blocks of the tower and reach the text beside `image_features`, so that setting those to zero does
not take the image out of the model.
"""

from typing import Any

from torch import Tensor

from nnterp.components.eproperty import EProperty
from nnterp.components.layer import Layer
from nnterp.components.standard import Standard
from nnterp.components.taps import assigned
from nnterp.components.vision.blocks import NO_IMAGE, NO_PROCESSOR
from nnterp.components.vision.layouts import ImageFeatures

FEATURES = "deepstack_features"


class DeepstackText(Standard):
    """A text model that adds features of the image to the stream behind its first blocks, one call for each."""

    METHODS = {"_deepstack_process": {FEATURES: assigned("visual_embeds")}}

    @property
    def blocks_fed(self) -> int:
        """How many blocks, from the first on, have features added behind them: one for each block of the tower that
        ``deepstack_visual_indexes`` names.
        """
        vision = getattr(self.root._module.config, "vision_config", None)
        return 0 if vision is None else sum(block in vision.deepstack_visual_indexes for block in range(vision.depth))


def _index(layer: Any) -> int:
    return int(layer.path.rsplit(".", 1)[-1])


def _location(layer: Any) -> str:
    """The visit of this block: the model comes by once behind each block it feeds, in their order."""
    index = _index(layer)
    return f"../../{FEATURES}_{index}" if index else f"../../{FEATURES}"


def _unfed(layer: Any) -> str | None:
    """Why no features are added behind this block, or None."""
    if layer.root.__dict__.get("processor") is None:
        return NO_PROCESSOR
    text = layer.parent.parent
    if _index(layer) >= text.blocks_fed:
        return f"features of the image are added behind the first {text.blocks_fed} blocks alone (DeepStack)"
    return text.tap_reason(FEATURES)


class DeepstackLayer(Layer):
    """A decoder block behind which its model may add features of the image."""

    @EProperty(_location, "The features of the image added to the stream behind this block", unavailable=_unfed)
    def deepstack_output(self, value: Tensor) -> ImageFeatures:
        """What the model adds to the stream of the image tokens behind this block, ``[image_tokens, hidden_size]``.

        ``layers[k + 1].layer_input[mask] == layers[k].layer_output[mask] + layers[k].deepstack_output`` where ``mask``
        is ``vision.image_token_mask``, and elsewhere the stream is what left the block. A prompt with videos has theirs
        here too, in the order of the tokens.

        In-place edits and assignment change that sum alone. To take an image out of the model set this to zero on every
        block that has it, and ``vision.image_features``: neither does alone.
        """
        return value

    deepstack_output.absent = NO_IMAGE
