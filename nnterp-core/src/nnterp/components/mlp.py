"""A feed-forward module: its neurons and what it adds to the stream."""

from torch import Tensor

from nnterp.components.eproperty import EProperty
from nnterp.components.layouts import Neurons, Residual
from nnterp.components.locations import FIRST
from nnterp.components.module_sizes import in_width, module_int
from nnterp.components.standard import Standard

#: Why a mixture's shared expert has no values of its own.
SHARED_EXPERT = "a mixture calls its shared expert with tokens, not rows: read shared_expert_output on the mixture"


class Mlp(Standard):
    """A feed-forward module. Its standard children are ``act_fn`` and ``down_proj``; a family aliases its own names.

    Attributes:
        CONTRIBUTION: Where what this module adds to the stream is read, a path from the module.
    """

    ROLE = "mlp"
    CONTRIBUTION = "output"
    PROJECTION = "down_proj"

    def inside_mixture(self) -> str | None:
        """Why this module's values are not laid out in rows, or None: it is no mixture's shared expert."""
        return SHARED_EXPERT if isinstance(self.parent, Mlp) else None

    @property
    def intermediate_size(self) -> int:
        """Width of this MLP's hidden layer, read off the module; NotImplementedError where it does not say."""
        return module_int(self, "intermediate_size", "ffn_dim") or in_width(self, "down_proj", "intermediate_size")

    @EProperty("act_fn.output", "The activation's output", unavailable=lambda mlp: mlp.inside_mixture())
    def mlp_activation(self, value: Tensor) -> Neurons:
        """The activation's output, ``[batch, seq, intermediate_size]``: ``act(gate(x))`` on a gated MLP, else
        ``act(up(x))``.

        In-place edits and assignment reach the model.
        """
        return value

    @EProperty(
        "down_proj.input", "The neurons, as the down projection sums them", unavailable=lambda mlp: mlp.inside_mixture()
    )
    def mlp_neurons(self, value: Tensor) -> Neurons:
        """The neurons' values that the down projection sums, ``[batch, seq, intermediate_size]``.

        ``act(gate(x)) * up(x)`` on a gated MLP; on a plain one the same tensor as `mlp_activation`. In-place edits and
        assignment reach the model.
        """
        return value

    @EProperty(
        lambda mlp: mlp.CONTRIBUTION,
        "What the MLP adds to the residual stream",
        unavailable=lambda mlp: mlp.inside_mixture(),
        select=FIRST,
    )
    def mlp_output(self, value: Tensor) -> Residual:
        """What the MLP adds to the residual stream, ``[batch, seq, hidden_size]``.

        The module's output, or wherever the family's block computes the term it adds. In-place edits and assignment
        reach the model.
        """
        return value
