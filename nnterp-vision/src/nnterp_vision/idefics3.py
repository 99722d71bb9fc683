"""Idefics 3: a tower over crops, its patches shuffled into fewer, wider ones; a helper puts them among the tokens."""

from transformers.models.idefics3 import modeling_idefics3 as modeling

from nnterp import components
from nnterp_vision.towers import clip, idefics3

RENAME = {**clip.names("model.vision_model"), "model.connector": "projector"}


class Scatter(components.ImageScatter):
    """Idefics 3's model, which puts the features in by a method of its own."""

    TAPS = {}
    METHODS = {"inputs_merger": {"image_features": components.argument("masked_scatter", 1)}}


ENVOYS = {**idefics3.ENVOYS, modeling.Idefics3Model: Scatter}
