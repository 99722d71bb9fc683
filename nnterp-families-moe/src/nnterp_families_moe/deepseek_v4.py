"""DeepSeek-V4: several residual streams, attention to compressed keys, experts hashed by token in the first blocks.

A token has ``hc_mult`` residual streams, all its embedding before the first block, which hyper-connections collapse
before each sublayer and mix behind it (``x`` and ``mid``: streams, ``^T``: transposed)::

    layer_mid    = attention_post (x) attention_output + attention_comb^T layer_input
    layer_output = mlp_post (x) mlp_output + mlp_comb^T layer_mid

where ``post (x) output`` gives each stream the output times its weight. `steer` adds its vector to every stream. Before
the final norm ``hc_head`` collapses the streams, so `project_on_vocab` takes them: ``[..., streams, hidden_size]``.
"""

from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from nnterp import components
from nnterp.components import EProperty, HeadOutputs, StreamMixing, Streams, StreamWeights
from nnterp.sizes import text_config

RENAME = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.hc_head": "hc_head",
    "gate": "router",
}

HASHED = "the token's id chooses its experts in this block, and its router's scores only weight them"


class Layer(components.Layer):
    """DeepSeek-V4's block, called with streams and returning streams."""

    TAPS = components.mid_at("ffn_hc")

    @property
    def streams(self) -> int:
        """Residual streams of a token."""
        return self._module.attn_hc.hc_mult

    layer_input = components.Layer.layer_input.at(layout=Streams)
    layer_mid = components.Layer.layer_mid.at(layout=Streams)
    layer_output = components.Layer.layer_output.at(layout=Streams)

    @EProperty("attn_hc.output", description="How much of attention_output each stream gets", select=0)
    def attention_post(self, value: Tensor) -> StreamWeights:
        """What each stream gets `attention_output` times, ``[batch, seq, streams]``, float32, between 0 and 2.

        In-place edits and assignment reach the model, which casts it to its dtype.
        """
        return value

    @EProperty("attn_hc.output", description="How the attention's hyper-connection mixes the streams", select=1)
    def attention_comb(self, value: Tensor) -> StreamMixing:
        """How the streams are mixed when the attention's output joins them, ``[batch, seq, streams, streams]``.

        Float32. Stream ``k`` becomes ``sum_j attention_comb[..., j, k] * layer_input[..., j, :]``; its weights sum to
        one over ``j``, and nearly so over ``k``. In-place edits and assignment reach the model, which casts it to its
        dtype.
        """
        return value

    @EProperty("ffn_hc.output", description="How much of mlp_output each stream gets", select=0)
    def mlp_post(self, value: Tensor) -> StreamWeights:
        """As `attention_post`, of the MLP."""
        return value

    @EProperty("ffn_hc.output", description="How the MLP's hyper-connection mixes the streams", select=1)
    def mlp_comb(self, value: Tensor) -> StreamMixing:
        """As `attention_comb`, of the MLP: it mixes `layer_mid`."""
        return value


class Attention(components.Attention):
    """DeepSeek-V4's attention: one key head, whose keys are the values too, and a learned sink per head.

    A block that compresses has more keys than tokens: behind one per token those of the windows compressed so far,
    along the sequence axis of keys and values and the key axis of scores and pattern. Keys and values are one tensor
    and are edited apart; in-place edits of the keys stay in the cache where the block does not compress, those of the
    values never do. The heads' outputs are rotated back by the query's position before they are projected, which is
    where the premix is read.
    """

    SINK = True

    @EProperty("o_a_proj.input", description="What enters the output projection, per head")
    def attention_premix(self, value: Tensor) -> HeadOutputs:
        """What the output projection mixes, ``[batch, seq, num_heads, head_dim]``: a view of its input.

        `attention_head_outputs`, rotated back. In-place edits and assignment reach the model.
        """
        return value.unflatten(-1, (self.num_heads // value.shape[2], -1)).flatten(2, 3)

    @attention_premix.postprocess
    def attention_premix(self, value: Tensor) -> Tensor:
        return value.flatten(2).unflatten(-1, (self._module.o_a_proj.n_groups, -1))


class Router(components.BiasedRouter):
    """The router of a block that chooses experts by their scores and a bias."""

    TAPS = {
        "router_logits": components.assigned("logits", 0),
        "choice_scores": components.argument("topk"),
    }


class HashRouter(components.Router):
    """The router of a block that looks a token's experts up by its id."""

    TAPS = {"router_logits": components.assigned("logits", 0)}


class Moe(components.BiasedMoe):
    """DeepSeek-V4's mixture; `SCORING` is the config's ``scoring_func``.

    Where the token's id chooses the experts, an edit of the logits changes the weights alone.
    """

    @property
    def SCORING(self) -> str:
        """The function that makes scores of the logits."""
        return text_config(self.root).scoring_func

    def hashed(self) -> str | None:
        """Why there is nothing that the experts are chosen by, or None."""
        return HASHED if self._module.is_hash else None

    choice_scores = components.BiasedMoe.choice_scores.at("router.choice_scores", unavailable=lambda moe: moe.hashed())


ENVOYS = {
    modeling.DeepseekV4DecoderLayer: Layer,
    modeling.DeepseekV4Attention: Attention,
    modeling.DeepseekV4SparseMoeBlock: Moe,
    modeling.DeepseekV4TopKRouter: Router,
    modeling.DeepseekV4HashRouter: HashRouter,
}


def project_on_vocab(model, hidden: Tensor) -> Tensor:
    """The streams of a token, ``[..., streams, hidden_size]``, are collapsed before the final norm."""
    streams = text_config(model).hc_mult
    if hidden.dim() < 2 or hidden.shape[-2] != streams:
        raise ValueError(
            f"project_on_vocab takes the {streams} streams of a token, [..., {streams}, hidden_size], and the shape "
            f"given is {tuple(hidden.shape)}; of one vector a token, lm_head(norm(vector)) gives the logits"
        )
    tokens = hidden.reshape(1, -1, *hidden.shape[-2:])
    logits = model.lm_head(model.norm(model.hc_head(tokens)))
    return logits.reshape(*hidden.shape[:-2], logits.shape[-1])
