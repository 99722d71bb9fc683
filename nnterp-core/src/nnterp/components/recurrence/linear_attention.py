"""Gated DeltaNet and its kin: linear attention whose state is one matrix per head."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nnterp.components.eproperty import DerivedEProperty, EProperty
from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import FINAL, INPUTS, OUTPUTS, STATE_AT, STATES, kernel_call
from nnterp.components.recurrence.mixer import (
    FinalState,
    RecurrentMixer,
    StateInput,
    StatesEProperty,
    at_kernel,
    effective_attention,
    entering,
)
from nnterp.components.recurrence.sources import PER_TOKEN, plain

#: ``[batch, seq, heads, key_dim]``.
LinearQK = Float[Tensor, "batch seq heads key_dim"]
#: ``[batch, seq, heads, value_dim]``.
LinearV = Float[Tensor, "batch seq heads value_dim"]
#: One number per token and head, ``[batch, seq, heads]``.
Gates = Float[Tensor, "batch seq heads"]
#: One number per token, head and key channel, ``[batch, seq, heads, key_dim]``.
ChannelGates = Float[Tensor, "batch seq heads key_dim"]
#: A recurrent state, the key side first, ``[batch, heads, key_dim, value_dim]``.
State = Float[Tensor, "batch heads key_dim value_dim"]
#: One state per token, ``[batch, seq, heads, key_dim, value_dim]``.
States = Float[Tensor, "batch seq heads key_dim value_dim"]


class LinearAttention(RecurrentMixer):
    """A gated DeltaNet mixer: for each token the state decays, takes up the new key and value, and is read.

    Per head, with queries and keys of unit length and queries over ``sqrt(key_dim)``::

        S = exp(decay) * S
        S = S + key (beta * (value - S^T key))^T
        output = S^T query

    (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464). So the names of `Attention` mean what they mean there; there
    is no pattern, `effective_attention` is what comes of it. The state after each token exists in the kernel that loops
    over tokens, which a decode step runs through and a prompt where ``nnterp.route_kernels(model.family, "torch")``
    says so.
    """

    MECHANISM = "delta_rule"
    CHUNK_KERNEL = "torch_chunk_gated_delta_rule"
    RECURRENT_KERNEL = "torch_recurrent_gated_delta_rule"
    TAPS = {INPUTS: kernel_call(MECHANISM, CHUNK_KERNEL, RECURRENT_KERNEL)}

    # -- availability -----------------------------------------------------------------------------------------------

    def needs_recurrent_routing(self) -> str | None:
        """Why the state after each token is not held, or None: a prompt runs through the loop over tokens."""
        reason = self.no_kernel()
        loop = self.kernel()
        if reason is None and (loop is None or PER_TOKEN.get(plain(loop).__name__) is None):
            reason = (
                f"a prompt runs through {self.CHUNK_KERNEL}, which holds the state between chunks of tokens only: "
                f'call nnterp.route_kernels(model.family, "torch") first, which runs it token by token'
            )
        return reason or self.needs_torch_kernels()

    def fresh_state(self, values: Tensor) -> Tensor | str:
        return values.new_zeros(values.shape[0], self.heads, self.key_dim, self.value_dim, dtype=torch.float32)

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        """Heads of the state: the value heads, which keys and queries are repeated for."""
        return module_int(self, "num_v_heads", "num_heads")

    @property
    def key_dim(self) -> int:
        """Width of one head's keys and queries."""
        return module_int(self, "head_k_dim", "head_dim")

    @property
    def value_dim(self) -> int:
        """Width of one head's values and outputs."""
        return module_int(self, "head_v_dim", "head_dim")

    # -- values -----------------------------------------------------------------------------------------------------

    @entering("queries", "What reads the state")
    def attention_queries(self, value: Tensor) -> LinearQK:
        """The queries the delta rule receives, ``[batch, seq, heads, key_dim]``: after the convolution, the activation
        and the repeat for the value heads, before the norm and the scale.

        Assign to replace them; in-place edits reach the model where torch allows them (views of one ``split`` refuse
        them under autograd).
        """
        return value

    @entering("keys", "Where a token writes")
    def attention_keys(self, value: Tensor) -> LinearQK:
        """The keys the delta rule receives, ``[batch, seq, heads, key_dim]``, as `attention_queries`."""
        return value

    @entering("values", "What a token writes")
    def attention_values(self, value: Tensor) -> LinearV:
        """The values the delta rule receives, ``[batch, seq, heads, value_dim]``. Writes as on `attention_queries`."""
        return value

    @entering("decays", "The log of how much of the state each token keeps")
    def decays(self, value: Tensor) -> Gates:
        """The log of how much of the state each token keeps, ``[batch, seq, heads]``, float32, at most 0.

        In-place edits and assignment reach the model.
        """
        return value

    @entering("betas", "How strongly each token writes")
    def betas(self, value: Tensor) -> Gates:
        """How strongly each token's key and value are written, ``[batch, seq, heads]``, in (0, 1); (0, 2) where the
        checkpoint allows negative eigenvalues. In-place edits and assignment reach the model.
        """
        return value

    @StateInput(
        at_kernel(INPUTS),
        "The state this call starts from; None on a fresh prompt",
        unavailable=lambda mixer: mixer.no_kernel(),
        select="state_input",
    )
    def state_input(self, value: Any) -> State | None:
        """The state this call starts from, ``[batch, heads, key_dim, value_dim]``, float32; None on a fresh prompt.

        A copy, since the cache overwrites its own. Edit or assign it to start from another, on a fresh prompt as well;
        raises ValueError for another shape.
        """
        return value

    @EProperty(
        at_kernel(STATE_AT),
        "The state after each token, one visit per token",
        unavailable=lambda mixer: mixer.needs_recurrent_routing(),
    )
    def state(self, value: Tensor) -> State:
        """The state after a token of this call, ``[batch, heads, key_dim, value_dim]``, float32: one visit per token.

        ``for t in tracer.iter[:]`` walks them, ``tracer.iter[4]`` is the state after token 4; outside of either it is
        the one after token 0. An edit is what the token's own output and the following tokens go on from.
        """
        return value

    @StatesEProperty(
        at_kernel(STATES), "The state after every token", unavailable=lambda mixer: mixer.needs_recurrent_routing()
    )
    def states(self, value: Tensor) -> States:
        """The state after every token of this call, ``[batch, seq, heads, key_dim, value_dim]``, float32. Read-only.

        A copy, with what was written to single states. `states_at` has some of them, at a fraction of the memory.
        """
        return value

    effective_attention = DerivedEProperty(
        effective_attention,
        "How much each token's value contributes to each later output",
        unavailable=lambda mixer: mixer.no_kernel(),
        instead="attention_queries, attention_keys, decays or betas",
    )

    @EProperty(at_kernel(OUTPUTS), "What the queries read", unavailable=lambda mixer: mixer.no_kernel())
    def attention_head_outputs(self, value: Tensor) -> LinearV:
        """What the queries read, ``[batch, seq, heads, value_dim]``, before the gated norm and the output projection.

        In-place edits and assignment reach the model.
        """
        return value

    @FinalState(at_kernel(FINAL), "The state after this call's last token", unavailable=lambda mixer: mixer.no_kernel())
    def state_output(self, value: Any) -> State | None:
        """The state after this call's last token, ``[batch, heads, key_dim, value_dim]``, as the cache receives it;
        None where no cache is kept.

        A copy. An edit changes what the next step starts from, and not this call's output.
        """
        return value


class ChannelLinearAttention(LinearAttention):
    """Kimi delta attention (KDA): the gated delta rule with one decay per key channel (arXiv 2510.26692)."""

    CHUNK_KERNEL = "chunk_kimi_delta_attention"
    RECURRENT_KERNEL = "recurrent_kimi_delta_attention"
    TAPS = {INPUTS: kernel_call(LinearAttention.MECHANISM, CHUNK_KERNEL, RECURRENT_KERNEL)}

    @entering("decays", "The log of how much of the state each token keeps, per key channel")
    def decays(self, value: Tensor) -> ChannelGates:
        """The log of how much of each key channel of the state a token keeps, ``[batch, seq, heads, key_dim]``,
        float32, at most 0. In-place edits and assignment reach the model.
        """
        return value
