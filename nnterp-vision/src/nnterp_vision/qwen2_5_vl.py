"""Qwen2.5-VL: packed patches in the order of the windows they attend within, merged by the tower's last module."""

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from nnterp import components
from nnterp_vision.towers import qwen

RENAME = qwen.names("model.visual")

ENVOYS = {**qwen.QWEN2_5, modeling.Qwen2_5_VLModel: components.ImageScatter}
