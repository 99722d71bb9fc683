"""The axes of the values of an image tower."""

from jaxtyping import Bool, Float
from torch import Tensor

from nnterp.components.layouts import BATCH, HIDDEN, INTERMEDIATE, SEQ

IMAGES = "images"
PATCHES = "patches"
IMAGE_TOKENS = "image_tokens"
VISION_HIDDEN = "vision_hidden_size"

#: One vector of the tower's stream per patch, ``[images, patches, vision_hidden_size]``. A row is what the tower
#: attends within: an image, a crop or a tile of one; a tower that packs images has one row with the patches of all.
Patches = Float[Tensor, f"{IMAGES} {PATCHES} {VISION_HIDDEN}"]
#: ``[images, patches, intermediate_size]``.
PatchNeurons = Float[Tensor, f"{IMAGES} {PATCHES} {INTERMEDIATE}"]
#: Whether each token of the prompt stands for a piece of an image, ``[batch, seq]``.
ImageTokenMask = Bool[Tensor, f"{BATCH} {SEQ}"]
#: One vector of the text model's width per image token, in the order of the tokens, ``[image_tokens, hidden_size]``.
ImageFeatures = Float[Tensor, f"{IMAGE_TOKENS} {HIDDEN}"]
