"""LLaVA: a CLIP, SigLIP or Pixtral tower, of which the projector reads an inner block without the class token."""

from transformers.models.llava import modeling_llava as modeling

from nnterp import components
from nnterp_vision.towers import clip, pixtral, siglip

RENAME = {
    **clip.names("model.vision_tower"),
    **pixtral.names("model.vision_tower"),
    "model.multi_modal_projector": "projector",
}

ENVOYS = {**clip.ENVOYS, **siglip.ENVOYS, **pixtral.ENVOYS, modeling.LlavaModel: components.ImageScatter}
