"""Gemma 2 on vLLM: fused blocks with a norm before and after each sublayer, soft-capped scores and logits."""

from vllm.model_executor.models import gemma2 as modeling

from nnterp_vllm import components
from nnterp_vllm.values import Stream, on_engine

RENAME = {"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"}


class Layer(components.FusedLayer):
    """Gemma 2's block: ``post_attention_layernorm`` norms what the attention adds, not what the MLP receives."""

    layer_mid = on_engine(
        components.FusedLayer.layer_mid, "pre_feedforward_layernorm.inputs", Stream, halves="MID_HALVES"
    )
    mlp_norm_output = on_engine(components.FusedLayer.mlp_norm_output, "pre_feedforward_layernorm.output")


class Attention(components.Attention):
    """Gemma 2's attention: the scores are capped before they are masked; the block adds its normed output."""

    CONTRIBUTION = "../post_attention_layernorm.output"


class Mlp(components.Mlp):
    """Gemma 2's gated feed-forward; the block adds its normed output."""

    CONTRIBUTION = "../post_feedforward_layernorm.output"


ENVOYS = {modeling.Gemma2DecoderLayer: Layer, modeling.Gemma2Attention: Attention, modeling.Gemma2MLP: Mlp}
