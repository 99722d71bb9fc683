"""Qwen3-VL's text model: Qwen 3's block, norms on queries and keys, reached through its wrapper alone.

Its positions are three numbers a token, of time, height and width (M-RoPE, interleaved over the width of a head). The
model folds them into the rotary tables, so `attention_queries` and `attention_keys` are rotated by all three already.
Behind its first blocks the model adds features of the image to the stream (DeepStack): on image tokens the input of the
next block is `layer_output` and these, `deepstack_output`. The image reaches the text by `image_features` and by these:
setting the former to zero does not remove it.
"""

from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class TextModel(components.DeepstackText):
    """The decoder, which adds features of the image between its first blocks."""


class Layer(components.DeepstackLayer):
    """Qwen3-VL's text block."""


class Attention(components.Attention):
    """Qwen3-VL's attention on the stream: queries and keys are normed, then rotated."""


class Mlp(components.Mlp):
    """Qwen3-VL's gated feed-forward."""


ENVOYS = {
    modeling.Qwen3VLTextModel: TextModel,
    modeling.Qwen3VLTextDecoderLayer: Layer,
    modeling.Qwen3VLTextAttention: Attention,
    modeling.Qwen3VLTextMLP: Mlp,
}
