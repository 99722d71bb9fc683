"""LLaVA-NeXT: a CLIP or SigLIP tower over tiles of the image; the projector's output is put together again, with a
vector behind each row of it, before it takes the place of the image tokens.
"""

from transformers.models.llava_next import modeling_llava_next as modeling

from nnterp import components
from nnterp_vision.towers import clip, siglip

RENAME = {**clip.names("model.vision_tower"), "model.multi_modal_projector": "projector"}

ENVOYS = {**clip.ENVOYS, **siglip.ENVOYS, modeling.LlavaNextModel: components.ImageScatter}
