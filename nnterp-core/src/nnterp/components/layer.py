"""A decoder block: the residual stream entering it, between its sublayers, and leaving it."""

from typing import Any

from torch import Tensor, nn

from nnterp.components.eproperty import EProperty, unavailable
from nnterp.components.layouts import Residual
from nnterp.components.locations import FIRST, child
from nnterp.components.standard import Standard
from nnterp.components.taps import stream_before, visited

#: Why a block whose attention and MLP read the same stream has nothing between them.
PARALLEL = "the block is parallel: attention and MLP read the same stream, so there is none between them"

#: Why a block that norms what its sublayers return has no norm before them.
POST_NORM = "the block norms what its sublayers return, not what they are called with"

#: Why a block of a mixer alone has nothing behind it.
ONE_MIXER = "the block is one mixer on the stream, with no feed-forward behind it"


class Layer(Standard):
    """A decoder block. Its values are the residual stream at the block's boundaries.

    The boundaries are those of the pre-norm block, ``x + attn(norm1(x))`` then ``+ mlp(norm2(.))``, read at the aliased
    norms. A family whose block is built otherwise points them at its own modules (``.at(...)``) or marks them
    `unavailable` with the reason; a block without the module reports ``no <module> module on this block``.

    Attributes:
        returns_tuple: Whether the block returns ``(stream, something)``. Reads and writes find out by themselves; a
            skipped block, which returns nothing, is told here.
        self_attn, cross_attn, linear_attn, mlp, input_layernorm, post_attention_layernorm: The block's modules, where
            it has them.
    """

    returns_tuple: bool = False
    ROLE = "block"
    TAPS = {"layer_mid": stream_before("post_attention_layernorm")}

    def skip_with(self, hidden: Tensor) -> None:
        """Skip this block: it does not run, and ``hidden`` takes the place of its `layer_output`.

        ``hidden`` is ``[batch, seq, hidden_size]``, packed the way the block would have returned it. Call it inside a
        trace before the block runs; with several invokes, every one has to skip the block. Raises
        ValueError where ``hidden`` is not shaped like the stream entering the block.
        """
        type(self).layer_output.check(self, hidden, self.layer_input)
        self._count_in_cache(hidden)
        self.skip(self._returned(hidden))

    def _returned(self, hidden: Tensor) -> Any:
        """What the block returns with ``hidden`` for its stream, where it is skipped."""
        return (hidden, None) if self.returns_tuple else hidden

    def _count_in_cache(self, hidden: Tensor) -> None:
        """Have the key/value cache count the tokens of a call that skips this block, which adds no keys to it.

        transformers reads off one block's part of the cache how many tokens came before, and sizes the masks of all
        blocks by that. Stand-ins are counted in a part that holds no keys; of a width that no block has, so that one
        which runs after all at a later step fails, and does not attend to them.
        """
        from transformers import Cache

        args, kwargs = self.inputs
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)
        attention = child(self, "self_attn")
        module = getattr(attention, "_module", None)
        modules = module if isinstance(module, nn.ModuleList) else [module]
        indices = [each.layer_idx for each in modules if getattr(each, "layer_idx", None) is not None]
        once = "counted"  # of the invokes that skip it together
        location = f"{self.path}.{once}"
        if cache is None or not indices or visited(self.interleaver, self.path, f"{self.path}.input", once) != location:
            return
        batcher = self.interleaver.batcher
        rows = batcher.total if batcher is not None and batcher.batching else len(hidden)
        stand_ins = hidden.new_zeros(rows, 1, hidden.shape[1], 1)
        for index in indices:
            if not cache.get_seq_length(index) or cache.layers[index].keys.shape[-1] == 1:  # it has never run
                cache.update(stand_ins, stand_ins, index)

    @EProperty("input", description="The residual stream entering the block")
    def layer_input(self, value: Tensor) -> Residual:
        """The residual stream entering this block, before any of its norms, ``[batch, seq, hidden_size]``.

        With the contributions it is the identity the values are defined by:
        ``layer_input + attention_output + mlp_output == layer_output``. In-place edits and assignment reach the model.
        """
        return value

    @EProperty("input_layernorm.output", description="What the attention is called with, after its norm")
    def attention_norm_output(self, value: Tensor) -> Residual:
        """The output of the attention's norm, ``[batch, seq, hidden_size]``: what the attention is called with.

        In-place edits and assignment reach the model.
        """
        return value

    @EProperty("layer_mid", description="The residual stream between attention and MLP")
    def layer_mid(self, value: Tensor) -> Residual:
        """The residual stream between the two sublayers, ``[batch, seq, hidden_size]``: ``layer_input +
        attention_output``.

        Read where the block has computed it, before the MLP's norm. An edit, in place or assigned, changes the stream:
        both what the MLP receives and what its output is added to. Unavailable on a parallel block.
        """
        return value

    @EProperty("post_attention_layernorm.output", description="The output of the MLP's norm")
    def mlp_norm_output(self, value: Tensor) -> Residual:
        """The output of the MLP's norm, ``[batch, seq, hidden_size]``.

        The same tensor as `mlp_input` where nothing sits between. In-place edits and assignment reach the model.
        """
        return value

    @EProperty("mlp.input", description="What the MLP is called with")
    def mlp_input(self, value: Tensor) -> Residual:
        """What the MLP is called with, ``[batch, seq, hidden_size]``. In-place edits and assignment reach the model."""
        return value

    @EProperty("output", description="The residual stream leaving the block", select=FIRST)
    def layer_output(self, value: Tensor) -> Residual:
        """The residual stream leaving this block, ``[batch, seq, hidden_size]``.

        The first element where the block returns a tuple; an assignment keeps the others. In-place edits and assignment
        reach the model.
        """
        return value


def mid_at(module: str) -> dict[str, Any]:
    """`Layer.TAPS` of a block whose stream between the sublayers is what ``module`` is called with."""
    return {"layer_mid": stream_before(module)}


class ParallelLayer(Layer):
    """A block whose attention and MLP are both called with the output of one norm: nothing lies between them.

    `attention_norm_output` and `mlp_norm_output` are that one tensor, so an edit of either reaches both sublayers; to
    change what the MLP alone is called with, edit `mlp_input`.
    """

    TAPS = {}
    layer_mid = unavailable(PARALLEL)
    mlp_norm_output = Layer.mlp_norm_output.at("input_layernorm.output")


class MixerLayer(Layer):
    """A block that is one mixer on the stream, behind one norm: ``layer_output = layer_input + attention_output``."""

    TAPS = {}
    layer_mid = unavailable(ONE_MIXER)
    mlp_norm_output = unavailable(ONE_MIXER)
    mlp_input = unavailable(ONE_MIXER)
