"""SmolVLM's tower: Idefics 3's, with classes of its own."""

from torch import Tensor
from transformers.models.smolvlm import modeling_smolvlm as modeling

from nnterp import components
from nnterp_vision.towers import idefics3


class Vision(idefics3.Vision):
    """SmolVLM's tower: a row is a crop of an image, or the whole image at the size of a crop."""

    image_features = components.Vision.image_features.at()

    @image_features.postprocess
    def image_features(self, value: Tensor) -> Tensor:
        # Where a release counts features off by crops, a crop of one vector leaves them in the order of the tokens.
        return value.unsqueeze(1)


class Layer(idefics3.Layer):
    """SmolVLM's block of the tower."""


class Attention(idefics3.Attention):
    """SmolVLM's attention of the tower."""


class Mlp(idefics3.Mlp):
    """SmolVLM's feed-forward of the tower."""


ENVOYS = {
    modeling.SmolVLMVisionTransformer: Vision,
    modeling.SmolVLMEncoderLayer: Layer,
    modeling.SmolVLMVisionAttention: Attention,
    modeling.SmolVLMVisionMLP: Mlp,
}
