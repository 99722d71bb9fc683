"""Mllama (Llama 3.2 Vision): no token is replaced; blocks of the text model attend to what the projector returns."""

from nnterp_vision.towers import mllama

RENAME = {**mllama.names("model.vision_model"), "model.multi_modal_projector": "projector"}

ENVOYS = mllama.ENVOYS
