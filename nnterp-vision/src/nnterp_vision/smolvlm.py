"""SmolVLM: Idefics 3's tower and projector, smaller; its model puts the features among the tokens."""

from transformers.models.smolvlm import modeling_smolvlm as modeling

from nnterp import components
from nnterp_vision.towers import clip, smolvlm

RENAME = {**clip.names("model.vision_model"), "model.connector": "projector"}

#: What the features go to next: a method that merges them, or in later releases one that finds their places.
NEXT = "inputs_merger" if hasattr(modeling.SmolVLMModel, "inputs_merger") else "get_placeholder_mask"


class Scatter(components.ImageScatter):
    """SmolVLM's model, in which features take the place of tokens."""

    TAPS = {"image_features": components.assigned("image_hidden_states", before=NEXT)}


ENVOYS = {**smolvlm.ENVOYS, modeling.SmolVLMModel: Scatter}
