"""GPT-OSS: attention sinks, the top k chosen before the softmax, experts with biases and interleaved gates."""

from transformers.models.gpt_oss import modeling_gpt_oss as modeling

from nnterp import components

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.Layer):
    """GPT-OSS's block."""


class Attention(components.Attention):
    """GPT-OSS's attention: a learned sink per head takes part of each row."""

    SINK = True


class Moe(components.Moe):
    """GPT-OSS's mixture, which returns its output and the router's weights."""

    SCORING = "topk_softmax"
    WEIGHTS = (2, "routing_weights")
    INDICES = (1, "router_indices")


ENVOYS = {
    modeling.GptOssDecoderLayer: Layer,
    modeling.GptOssAttention: Attention,
    modeling.GptOssMLP: Moe,
    modeling.GptOssTopKRouter: components.Router,
}
