"""OPT: no MLP module (``fc1``, ``activation_fn`` and ``fc2`` on the block), a stream that is flattened around it."""

from torch import Tensor
from transformers.models.opt import modeling_opt as modeling

from nnterp import components
from nnterp.components import FlatResidual

RENAME = {
    "model.decoder.embed_tokens": "embed_tokens",
    "model.decoder.layers": "layers",
    "model.decoder.final_layer_norm": "norm",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "out_proj": "o_proj",
}

#: The block's variable that keeps the shape of the stream while it is flattened.
SHAPE = "hidden_states_shape"


def post_norm(layer: components.Layer) -> str | None:
    """Why ``layer`` norms nothing before its sublayers, or None."""
    return None if layer._module.do_layer_norm_before else components.POST_NORM


class Layer(components.Layer):
    """OPT's block. Its feed-forward is no module: the neurons and what they add are values of the block itself.

    The 350m layout (``do_layer_norm_before=False``) norms the stream itself after each sum: ``layer_mid`` is
    ``input_layernorm(layer_input + attention_output)``, ``layer_output`` is
    ``post_attention_layernorm(layer_mid + mlp_output)``. There, token embeddings are narrower than the stream
    (``word_embed_proj_dim``) and ``project_in`` widens them.
    """

    TAPS = {
        "layer_mid": components.assigned("hidden_states", before="reshape"),
        "mlp_norm": components.unflattened(components.result("final_layer_norm"), SHAPE),
        "neurons": components.unflattened(components.argument("fc2"), SHAPE),
        "attention_term": components.result("dropout", 0),
        "mlp_term": components.unflattened(components.result("dropout", 1), SHAPE),
    }
    attention_norm_output = components.Layer.attention_norm_output.at("input_layernorm.output", unavailable=post_norm)
    mlp_norm_output = components.Layer.mlp_norm_output.at("mlp_norm", unavailable=post_norm)
    mlp_neurons = components.Mlp.mlp_neurons.at("neurons", unavailable=None)
    mlp_output = components.Mlp.mlp_output.at("mlp_term", unavailable=None)

    @components.Flattened("layer_mid", description="The residual stream between attention and MLP, flattened")
    def layer_mid(self, value: Tensor) -> FlatResidual:
        """The residual stream between the two sublayers, ``[tokens, hidden_size]``: this invoke's rows, one by one.

        An edit, in place or assigned, changes the stream: what the MLP receives and what its output is added to.
        """
        return value


class Attention(components.Attention):
    """OPT's attention. Its queries are already scaled by ``head_dim ** -0.5``; the block drops out what it adds."""

    CONTRIBUTION = "../attention_term"


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
    return model.lm_head(hidden)
