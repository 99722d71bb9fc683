"""Gated DeltaNet and its kin: linear attention whose state is one matrix per head."""

from nnterp.components.module_sizes import module_int
from nnterp.components.recurrence.calls import INPUTS, kernel_call
from nnterp.components.recurrence.layouts import ChannelGates
from nnterp.components.recurrence.mixer import RecurrentMixer
from nnterp.components.recurrence.sources import PER_TOKEN, plain


class LinearAttention(RecurrentMixer):
    """A gated DeltaNet mixer: for each token the state decays, takes up the new key and value, and is read.

    Per head, with queries and keys of unit length and queries over ``sqrt(key_dim)``::

        S = exp(decay) * S
        S = S + key (beta * (value - S^T key))^T
        output = S^T query

    (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464). So the names of `Attention` mean what they mean there; there
    is no pattern, `effective_attention` is what comes of it. The state after each token exists in the kernel that loops
    over tokens, which a decode step runs through and a prompt where ``nnterp.route_kernels(model.family, "torch")``
    says so. Queries and keys are served after the repeat for the value heads, before the norm and the scale; betas are
    in (0, 1), or (0, 2) where the checkpoint allows negative eigenvalues; states are float32.
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


class ChannelLinearAttention(LinearAttention):
    """Kimi delta attention (KDA): the gated delta rule with one decay per key channel (arXiv 2510.26692)."""

    CHUNK_KERNEL = "chunk_kimi_delta_attention"
    RECURRENT_KERNEL = "recurrent_kimi_delta_attention"
    TAPS = {INPUTS: kernel_call(LinearAttention.MECHANISM, CHUNK_KERNEL, RECURRENT_KERNEL)}

    decays = LinearAttention.decays.at(layout=ChannelGates)
