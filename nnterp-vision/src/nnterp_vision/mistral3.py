"""Mistral 3: Pixtral's tower, whose patches the projector norms and merges two by two."""

from transformers.models.mistral3 import modeling_mistral3 as modeling

from nnterp import components
from nnterp_vision.towers import pixtral

RENAME = {**pixtral.names("model.vision_tower"), "model.multi_modal_projector": "projector"}

ENVOYS = {**pixtral.ENVOYS, modeling.Mistral3Model: components.ImageScatter}
