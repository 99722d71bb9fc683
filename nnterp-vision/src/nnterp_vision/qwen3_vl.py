"""Qwen3-VL: packed patches, of which inner blocks reach the text as well (DeepStack).

Features take the place of the image tokens, and others are added to the stream behind the first blocks of the text
(``layers[k].deepstack_output``, its text family's): to take an image out of the model set both to zero.
"""

from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

from nnterp import components
from nnterp_vision.towers import qwen

RENAME = {**qwen.names("model.visual"), "mlp.linear_fc2": "mlp.down_proj"}

ENVOYS = {**qwen.QWEN3, modeling.Qwen3VLModel: components.ImageScatter}
