"""Qwen2-VL: packed patches that attend to their own image, merged two by two by the tower's last module."""

from transformers.models.qwen2_vl import modeling_qwen2_vl as modeling

from nnterp import components
from nnterp_vision.towers import qwen

RENAME = {**qwen.names("model.visual"), "mlp.act": "mlp.act_fn", "mlp.fc2": "mlp.down_proj"}

ENVOYS = {**qwen.QWEN2, modeling.Qwen2VLModel: components.ImageScatter}
