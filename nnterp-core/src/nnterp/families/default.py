"""The best-effort family: any decoder whose modules go by names that another family has too.

A name says where the blocks, the embedding, the final norm and the head are, and which module of a block is its
attention or its MLP. It does not say what a sublayer adds to the stream, what lies between two of them, or what becomes
of the head's output: the values that rest on these are unavailable here. The others are served as far as a look at the
model bears them out. `check` runs it on shapes alone, refuses a model whose blocks do not hand a residual stream from
one to the next, and marks each value that is never served, served several times, or laid out otherwise than its name
says.
"""

from collections.abc import Callable
from typing import Any

from nnterp import components, inspection, loading
from nnterp.components import Unavailable, unavailable
from nnterp.root import Standardized
from nnterp.sizes import text_config


def _spelled(standard: str, *natives: str) -> dict[str, str]:
    return dict.fromkeys(natives, standard)


#: The standard name of each name that some family has for the module: paths from the root, then a block's modules, then
#: what is inside them.
RENAME = {
    **_spelled(
        "embed_tokens", "model.embed_tokens", "model.decoder.embed_tokens", "model.embeddings", "transformer.wte"
    ),
    **_spelled("embed_tokens", "transformer.word_embeddings", "transformer.w", "transformer.tokens_embed"),
    **_spelled("embed_tokens", "gpt_neox.embed_in", "gpt_neox_japanese.embed_in", "backbone.embeddings"),
    **_spelled("embed_tokens", "biogpt.embed_tokens", "cpmant.input_embedding", "rwkv.embeddings"),
    **_spelled("layers", "model.layers", "model.decoder.layers", "transformer.h", "transformer.blocks"),
    **_spelled("layers", "gpt_neox.layers", "gpt_neox_japanese.layers", "backbone.layers", "backbone.blocks"),
    **_spelled("layers", "biogpt.layers", "cpmant.encoder.layers", "rwkv.blocks"),
    **_spelled("norm", "model.norm", "model.final_layernorm", "model.final_norm", "model.layer_norm", "model.norm_f"),
    **_spelled("norm", "model.embedding_norm", "model.decoder.final_layer_norm", "transformer.ln_f"),
    **_spelled("norm", "transformer.norm_f", "transformer.layernorm", "gpt_neox.final_layer_norm"),
    **_spelled("norm", "gpt_neox_japanese.final_layer_norm", "backbone.norm_f", "backbone.out_norm"),
    **_spelled("norm", "biogpt.layer_norm", "cpmant.encoder.output_layernorm", "rwkv.ln_out"),
    **_spelled("lm_head", "embed_out", "output_projection", "head"),
    **_spelled("self_attn", "attn", "attention", "self_attention", "multi_head_attention", "self_att"),
    **_spelled("mlp", "ffn", "feed_forward", "block_sparse_moe", "mlp_block"),
    **_spelled("attn.o_proj", "attn.c_proj", "attn.out_proj", "attn.Wo", "attn.attention.out_proj"),
    **_spelled("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense"),
    "self_attention.dense": "self_attention.o_proj",
    "attention.dense": "attention.o_proj",
    "multi_head_attention.dense": "multi_head_attention.o_proj",
    **_spelled("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc_out", "mlp.fc2", "mlp.Wo"),
    **_spelled("mlp.act_fn", "mlp.act", "mlp.activation_fn"),
    "ffn.act": "ffn.act_fn",
    "ffn.proj_down": "ffn.down_proj",
}

CONTRIBUTION = "what a sublayer adds to the stream depends on the block's code, which a name does not show"
BETWEEN = "which norm precedes which sublayer, and where the stream is between them, a name does not show"
HEAD = "what the model does to the stream before its head and to the logits after it, a name does not show"


class Layer(components.Layer):
    """A block: the stream that enters and leaves it."""

    TAPS = {}
    attention_norm_output = unavailable(BETWEEN)
    layer_mid = unavailable(BETWEEN)
    mlp_norm_output = unavailable(BETWEEN)


class Attention(components.Attention):
    """An attention. Its heads are counted on what it hands to transformers' attention interface, where it does."""

    attention_output = unavailable(CONTRIBUTION)

    def _measured(self, value: str, axis: int) -> int | None:
        shape = self.shapes.get(value, ())
        return shape[axis] if len(shape) == 4 else None

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._measured("attention_queries", 1) or components.Attention.num_heads.fget(self)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads as the interface receives them."""
        return self._measured("attention_keys", 1) or components.Attention.num_kv_heads.fget(self)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys."""
        return self._measured("attention_queries", 3) or components.Attention.qk_head_dim.fget(self)

    @property
    def head_dim(self) -> int:
        """Width of one head's values and outputs."""
        return self._measured("attention_values", 3) or components.Attention.head_dim.fget(self)


class Mlp(components.Mlp):
    """A feed-forward: what it is called with, and its neurons where it is no mixture."""

    mlp_output = unavailable(CONTRIBUTION)


ENVOYS = {"layers.*": Layer, "self_attn": Attention, "mlp": Mlp}


def project_on_vocab(model: Any, hidden: Any) -> Any:
    """Raises `Unavailable`, as does what rests on it."""
    raise Unavailable(f"project_on_vocab of {model.path} is unavailable: {HEAD}")


def _on_the_blocks(size: str, module: str, value: str, *spellings: str) -> Callable[[Any], int]:
    """A root size as the first block has it whose ``value``, on ``module``, bears it out; else as the config says."""

    def read(model: Any) -> int:
        hosts = (block.__dict__.get(module) for block in model.layers)
        host = next((each for each in hosts if value in getattr(each, "shapes", ())), None)
        if host is not None:
            return getattr(host, size)
        said = (getattr(text_config(model), spelling, None) for spelling in spellings)
        return next(filter(None, said), None) or getattr(Standardized, size).rule(model)

    return read


num_heads = _on_the_blocks("num_heads", "self_attn", "attention_queries")
num_kv_heads = _on_the_blocks("num_kv_heads", "self_attn", "attention_keys")
qk_head_dim = _on_the_blocks("qk_head_dim", "self_attn", "attention_queries")
head_dim = _on_the_blocks("head_dim", "self_attn", "attention_values")
intermediate_size = _on_the_blocks(
    "intermediate_size", "mlp", "mlp_neurons", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"
)


def check(model: Any) -> None:
    """Raise UnsupportedFamily where nothing here could be right, and mark the values that are not (`Standard.refused`).

    Runs the model on shapes alone and loads no weights. `nnterp.inspection` says what is looked at.
    """
    loading.refuse_encoders(model._module.config, text_config(model).model_type)
    inspection.require_modules(model)
    seen = inspection.look(model)
    inspection.require_stream(model, seen)
    inspection.refuse_values(model, seen)
