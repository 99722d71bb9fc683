"""OPT on vLLM: plain blocks without an MLP module (``fc1``, ``activation_fn`` and ``fc2`` on the block)."""

from torch import Tensor
from vllm.model_executor.models import opt as modeling

from nnterp.components import FIRST, POST_NORM, assigned
from nnterp_vllm import components
from nnterp_vllm.values import on_engine

RENAME = {
    "model.decoder.embed_tokens": "embed_tokens",
    "model.decoder.layers": "layers",
    "model.decoder.final_layer_norm": "norm",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "out_proj": "o_proj",
}


def post_norm(layer: components.Layer) -> str | None:
    """Why ``layer`` norms nothing before its sublayers, or None."""
    return None if layer._module.do_layer_norm_before else POST_NORM


class Layer(components.Layer):
    """OPT's block, whose feed-forward is values of the block itself.

    The 350m layout norms the stream after each sum: ``layer_mid`` is ``input_layernorm(layer_input +
    attention_output)`` there.
    """

    TAPS = {"layer_mid": assigned("hidden_states", 3)}
    attention_norm_output = on_engine(components.Layer.attention_norm_output, unavailable=post_norm)
    mlp_norm_output = on_engine(components.Layer.mlp_norm_output, unavailable=post_norm)
    mlp_neurons = on_engine(components.Mlp.mlp_neurons, "fc2.input", unavailable=None)
    mlp_output = on_engine(components.Mlp.mlp_output, "fc2.output", unavailable=None, select=FIRST)


class Attention(components.Attention):
    """OPT's attention; its queries are scaled by ``head_dim ** -0.5`` already."""

    SCALED_QUERIES = True


ENVOYS = {modeling.OPTDecoderLayer: Layer, modeling.OPTAttention: Attention}


def intermediate_size(model) -> int:
    """``ffn_dim``."""
    return model.config.ffn_dim


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The final norm and ``project_out``, each where the checkpoint has it, then the head."""
    decoder = model.model.decoder
    for name in ("final_layer_norm", "project_out"):
        if getattr(decoder._module, name) is not None:
            hidden = getattr(decoder, name)(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return model.head_logits(hidden)
