"""Idefics 3's tower: SigLIP's blocks, under a mask of the patches that padding leaves out."""

from transformers.models.idefics3 import modeling_idefics3 as modeling

from nnterp import components


class Vision(components.Vision):
    """Idefics 3's tower: a row is a crop of an image, or the whole image at the size of a crop."""

    NORM = "post_layernorm"


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
