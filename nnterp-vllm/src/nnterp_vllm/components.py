"""The components of a decoder on the engine: the values of `nnterp.components` where vLLM's modules have them."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor

from nnterp import components
from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import Unavailable, unavailable
from nnterp.components.layouts import Pattern
from nnterp.components.locations import FIRST, child
from nnterp.components.standard import Standard
from nnterp_vllm.values import Flat, Halves, Stream, on_engine

#: Why a gated feed-forward has no activation to read.
FUSED_ACTIVATION = "the engine's activation multiplies by the up projection in the same operation: read mlp_neurons"
#: Why an activation that is not this module's own has no output to read here.
SHARED_ACTIVATION = "one activation module does the work of every block, so a block's own output of it cannot be told"
#: Why what a kernel computes cannot be read.
IN_KERNEL = "it is inside the engine's kernel, which hands nothing of it out"
#: Why a mixture has router logits and nothing behind them.
IN_MIXTURE_KERNEL = "the engine's kernel scores, routes and runs the experts in one: read and edit router_logits"


class OnEngine(Standard):
    """An envoy that travels with every request into the engine's worker, where the places of its values are put in."""

    def __getstate__(self) -> dict:
        # A part of a block may be all that a request names, and reach for a place in the block.
        state = super().__getstate__()
        state["_above"] = self.parent
        return state

    def __setstate__(self, state: dict) -> None:
        above = state["_above"]
        super().__setstate__(state)
        if above is not None:
            self.__dict__["_parent"] = weakref.ref(above)

    def arrive(self) -> None:
        self.install()


class Block(OnEngine):
    """A block of a model that runs the requests of several blocks of code in one step."""

    def skip_with(self, hidden: Tensor) -> None:
        """Skip this block for this request: ``hidden``, ``[1, tokens, hidden_size]``, replaces its `layer_output`.

        The block runs all the same, as other requests of the step may need it, and keeps its keys and values. Call it
        inside a trace before the block runs. Raises ValueError where ``hidden`` is not shaped like the stream.
        """
        self.layer_output = hidden


class Layer(Block, components.Layer):
    """A block that takes and returns the stream whole, ``[tokens, hidden_size]``.

    Attributes:
        HALVES: Where the stream is among the block's arguments, by position and keyword: what was added last, and the
            rest, which is not there in a block that takes it whole.
        FUSED: Whether the stream comes and goes in two halves.
    """

    HALVES: Halves = ((0, "hidden_states"),)
    FUSED: bool = False

    layer_input = on_engine(components.Layer.layer_input, "inputs", Stream)
    attention_norm_output = on_engine(components.Layer.attention_norm_output, select=FIRST)
    layer_mid = on_engine(components.Layer.layer_mid)
    mlp_norm_output = on_engine(components.Layer.mlp_norm_output, select=FIRST)
    mlp_input = on_engine(components.Layer.mlp_input)
    layer_output = on_engine(components.Layer.layer_output, "output", Stream)


class FusedLayer(Layer):
    """A block that is called with ``(positions, hidden_states, residual)`` and returns the last two, each sum left to
    the next norm: the stream is the two together.

    Attributes:
        MID_HALVES: Where the halves are in the call of the norm that has the stream between the sublayers.
    """

    HALVES = ((1, "hidden_states"), (2, "residual"))
    FUSED = True
    MID_HALVES: Halves = ((0, "x"), (1, "residual"))
    TAPS = {}
    layer_mid = on_engine(
        components.Layer.layer_mid, "post_attention_layernorm.inputs", Stream, halves="MID_HALVES", unavailable=None
    )


class FusedMixerLayer(FusedLayer):
    """A fused block that is one mixer behind one norm, called with ``(hidden_states, residual)``."""

    HALVES = ((0, "hidden_states"), (1, "residual"))
    layer_mid = components.MixerLayer.layer_mid
    mlp_norm_output = components.MixerLayer.mlp_norm_output
    mlp_input = components.MixerLayer.mlp_input


# -- attention --------------------------------------------------------------------------------------------------------


def _recomputed(attention: "Attention") -> tuple[Tensor, torch.dtype]:
    """The scores of this step's queries and keys in float32, and the dtype of the queries."""
    queries, keys = attention.attention_queries, attention.attention_keys
    layer = attention.attn._module
    refuse_decode_step(attention, queries.shape[2])
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2))
    scores = scores * (layer.impl.scale / attention.queries_factor())
    cap = getattr(layer.impl, "logits_soft_cap", None)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    position = torch.arange(scores.shape[-1], device=scores.device)
    behind = position[:, None] - position
    slopes = getattr(layer.impl, "alibi_slopes", None)
    if slopes is not None:
        scores = scores - torch.as_tensor(slopes, device=scores.device)[:, None, None] * behind
    hidden = behind < 0
    if layer.sliding_window:
        hidden = hidden | (behind >= layer.sliding_window)
    return scores.masked_fill(hidden, float("-inf")), queries.dtype


def refuse_decode_step(attention: "Attention", tokens: int) -> None:
    """Raise Unavailable where the keys of this request's earlier tokens are in the engine's cache."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    metadata = metadata[attention.attn._module.layer_name] if isinstance(metadata, dict) else metadata
    row = getcurrent().mediator().row
    if int(metadata.seq_lens[row]) != tokens:
        raise Unavailable(
            f"the scores and the pattern of {attention.path} are unavailable on a decode step: they are computed again "
            f"from queries and keys, and those of earlier tokens are in the engine's cache"
        )


def _scores(attention: "Attention") -> Pattern:
    """The scaled, masked scores, ``[1, num_heads, query, key]``, in the model's dtype; hidden keys hold ``-inf``.

    Computed again from the queries and keys of a prompt: what the kernel computes stays inside it. Read-only; raises
    Unavailable on a decode step, whose earlier keys are in the engine's cache.
    """
    scores, dtype = _recomputed(attention)
    return scores.to(dtype)


def _probabilities(attention: "Attention") -> Pattern:
    """The pattern, ``[1, num_heads, query, key]``, in the model's dtype: the softmax of `attention_scores`, in float32.

    Computed again as they are, and read-only like them.
    """
    scores, dtype = _recomputed(attention)
    return scores.softmax(-1).to(dtype)


def ranks(envoy: OnEngine) -> int:
    """Over how many devices the tensors of this envoy's model are split."""
    return getattr(envoy.root, "kwargs", {}).get("tensor_parallel_size") or 1


def no_engine_attention(attention: "Attention") -> str | None:
    """Why this module's mixing is not the engine's plain attention layer, which has all heads, or None."""
    if ranks(attention) > 1:
        return "tensor parallelism gives each device the attention of its own heads: read attention_premix"
    layer = getattr(child(attention, "attn"), "_module", None)
    if layer is None:
        return "this module has no attention layer of the engine"
    if not hasattr(layer, "head_size") or not hasattr(layer, "num_kv_heads"):
        return f"{type(layer).__name__} compresses keys and values, and keeps their heads inside the kernel"
    return None


def no_scores(attention: "Attention") -> str | None:
    """Why the scores cannot be computed again, or None."""
    reason = no_engine_attention(attention)
    if reason is None and getattr(attention.attn._module, "has_sink", False):
        return "an attention sink takes part of each row inside the engine's kernel"
    return reason


class Attention(OnEngine, components.Attention):
    """An attention whose mixing is a module of the engine, ``attn``: queries, keys and values go into it, head outputs
    come out. This step's tokens alone: on a decode step the new one's.

    Attributes:
        SCALED_QUERIES: Whether queries are served scaled, as transformers has them in this family, where the engine's
            layer scales the scores.
    """

    SCALED_QUERIES: bool = False

    attention_queries = on_engine(
        components.Attention.attention_queries,
        "attn.inputs",
        unavailable=no_engine_attention,
        select=(0, "query"),
        factor=lambda attention: attention.queries_factor(),
    )
    attention_keys = on_engine(
        components.Attention.attention_keys, "attn.inputs", unavailable=no_engine_attention, select=(1, "key")
    )
    attention_values = on_engine(
        components.Attention.attention_values, "attn.inputs", unavailable=no_engine_attention, select=(2, "value")
    )
    attention_scores = DerivedEProperty(
        _scores, "The scores, computed again from queries and keys", unavailable=no_scores
    )
    attention_probabilities = DerivedEProperty(
        _probabilities, "The pattern, computed again from queries and keys", unavailable=no_scores
    )
    attention_head_outputs = on_engine(
        components.Attention.attention_head_outputs, "attn.output", unavailable=no_engine_attention
    )
    attention_premix = on_engine(components.Attention.attention_premix)
    attention_output = on_engine(components.Attention.attention_output)

    def install(self) -> None:
        Standard.install(self)  # transformers' attention interface has no part in it

    def queries_factor(self) -> float:
        """What the engine's queries are multiplied by to be the served ones."""
        return self._layer().impl.scale if self.SCALED_QUERIES else 1.0

    def _layer(self) -> Any:
        layer = getattr(child(self, "attn"), "_module", None)
        if not hasattr(layer, "head_size"):
            raise NotImplementedError(f"{self.path} does not say how wide its heads are: {no_engine_attention(self)}")
        return layer

    @property
    def num_heads(self) -> int:
        """Query heads, of all devices together."""
        return self.o_proj._module.input_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads, on a model that is not split over devices."""
        return self._layer().num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head's values and outputs."""
        return getattr(self._layer(), "head_size_v", None) or self._layer().head_size

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys."""
        return self._layer().head_size


# -- feed-forwards ----------------------------------------------------------------------------------------------------


def fused_activation(mlp: "Mlp") -> str | None:
    """Why the activation's output is not that alone, or None."""
    activation = getattr(child(mlp, "act_fn"), "_module", None)
    return FUSED_ACTIVATION if type(activation).__name__.endswith("AndMul") else mlp.inside_mixture()


def no_own_activation(mlp: "Mlp") -> str | None:
    """Why the output of the module's activation is not its own activation's output alone, or None."""
    activation = child(mlp, "act_fn")
    shared = activation is not None and not activation.path.startswith(f"{mlp.path}.")
    return fused_activation(mlp) or (SHARED_ACTIVATION if shared else None)


class Mlp(OnEngine, components.Mlp):
    """A feed-forward. Where it is gated, its activation multiplies by the up projection in the same operation."""

    @property
    def intermediate_size(self) -> int:
        """Width of this MLP's hidden layer."""
        return self.down_proj._module.input_size

    # One activation module of vLLM's does the work of all blocks; where it does not multiply, neurons are its output
    mlp_activation = on_engine(components.Mlp.mlp_activation, "down_proj.input", unavailable=fused_activation)
    mlp_neurons = on_engine(components.Mlp.mlp_neurons)
    mlp_output = on_engine(components.Mlp.mlp_output)


class Moe(OnEngine, components.Moe):
    """A mixture of experts: the gate is a module of its own, what follows is one kernel.

    An edit of `router_logits` decides where tokens go and with what weights.
    """

    TAPS: Mapping[str, Any] = {}
    router_logits = on_engine(components.Moe.router_logits, "router.output", Flat, select=FIRST)
    expert_weights = unavailable(IN_MIXTURE_KERNEL)
    expert_indices = unavailable(IN_MIXTURE_KERNEL)
    expert_outputs = unavailable(IN_MIXTURE_KERNEL)
    routed_output = on_engine(components.Moe.routed_output, select=FIRST)
    shared_expert_output = unavailable(IN_MIXTURE_KERNEL)
    mlp_output = on_engine(components.Moe.mlp_output)

    def install(self) -> None:
        Standard.install(self)  # transformers' experts have no part in it

    def _config(self) -> Any:
        return self.experts._module.moe_config

    @property
    def num_experts(self) -> int:
        """Routed experts."""
        return self._config().num_logical_experts

    @property
    def top_k(self) -> int:
        """Experts each token is routed to."""
        return self._config().experts_per_token

    @property
    def intermediate_size(self) -> int:
        """Width of one routed expert's hidden layer."""
        return self._config().intermediate_size

    def expert_output(self, expert: int, hidden: Tensor) -> Tensor:
        """Not on this engine, which packs the experts' weights for its kernel: raises Unavailable."""
        raise Unavailable(f"expert_output of {self.path} is unavailable: {IN_MIXTURE_KERNEL}")


class StateSpace(OnEngine, components.StateSpace):
    """A Mamba-2 mixer, whose convolution and scan are one operation of the engine: what comes out of it is there,
    before and after the gated norm, and what the mixer adds.
    """

    TAPS: Mapping[str, Any] = {}
    attention_queries = unavailable(IN_KERNEL)
    attention_keys = unavailable(IN_KERNEL)
    attention_values = unavailable(IN_KERNEL)
    betas = unavailable(IN_KERNEL)
    decays = unavailable(IN_KERNEL)
    state_input = unavailable(IN_KERNEL)
    state = unavailable(IN_KERNEL)
    states = unavailable(IN_KERNEL)
    state_output = unavailable(IN_KERNEL)
    effective_attention = unavailable(IN_KERNEL)
    attention_head_outputs = on_engine(
        components.StateSpace.attention_head_outputs, "norm.inputs", unavailable=None, select=(0, "x")
    )
    attention_output = on_engine(components.StateSpace.attention_output)

    def no_kernel(self) -> str | None:
        return IN_KERNEL

    needs_per_token_chunks = needs_recurrent_routing = needs_pieces = no_kernel
