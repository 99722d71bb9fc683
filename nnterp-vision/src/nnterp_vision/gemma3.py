"""Gemma 3: a SigLIP tower, whose patches the projector pools to a fixed number of features for each image."""

from transformers.models.gemma3 import modeling_gemma3 as modeling

from nnterp import components
from nnterp_vision.towers import clip, siglip

RENAME = {**clip.names("model.vision_tower"), "model.multi_modal_projector": "projector"}

ENVOYS = {**siglip.ENVOYS, modeling.Gemma3Model: components.ImageScatter}

#: The processor's attribute that stands for one image in a prompt: it is written out as this and the image's tokens.
PLACEHOLDER = "boi_token"
