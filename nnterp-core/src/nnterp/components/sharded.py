"""Whole values on a model that tensor parallelism splits over several processes.

nnsight gathers what a module is called with and returns, where the plan of transformers says that it is one rank's
part, and splits it again behind the trace. It knows nothing of places inside a module: between the projections that cut
the heads or the neurons apart and the one that sums over them, every rank holds its own. The layout of a value says
which axis that is, and the output projection says whether it is cut, so this adds the missing rules to nnsight's own.
"""

from typing import Any

from nnsight.modeling.tp import TPFragments
from nnsight.modeling.tp.envoys import SPLITS_ITS_OWN_INPUT
from nnsight.util import apply
from torch import Tensor

from nnterp.components.layouts import HEADS, INTERMEDIATE, KV_HEADS
from nnterp.components.locations import child

#: The axes that tensor parallelism cuts.
CUT = (HEADS, KV_HEADS, INTERMEDIATE)


class WholeValues(TPFragments):
    """nnsight's rules of a sharded model, with those of the standard values and without their restrictions.

    A value is made whole only for a trace that reads it, on every rank alike, and what the trace leaves is split again.
    It may be edited in place. On one process there are no rules and this costs one attribute test.
    """

    def fragmented(self, location: str) -> bool:
        """Whether a value at ``location`` has to be looked at before a trace has it: all of them, where any is split.

        A later visit of a place (``name_1``) is split as its first.
        """
        base, _, number = location.rpartition("_")
        if number.isdigit() and location not in self.tp_rules and base in self.tp_rules:
            self.tp_rules[location] = self.tp_rules[base]
        return True

    def whole(self, location: str, value: Any) -> tuple[Any, Any]:
        """The whole value, and how to split what the trace leaves of it."""
        mesh, placement = self.tp_rules.get(location, (None, None))
        if isinstance(placement, str):
            raise RuntimeError(placement)
        whole, undo = super().whole(location, value)
        if masked(value):  # the mask of a vocabulary that is split is spent by now: a plain sum comes to the same
            from torch.distributed.tensor import DTensor, Partial

            def undo(edited: Tensor) -> Tensor:
                return DTensor.from_local(self.split(location, edited), mesh, [Partial()], run_check=False)

        return editable(whole), undo


def masked(value: Any) -> bool:
    """Whether ``value`` is one rank's part of an embedding whose vocabulary is split."""
    from torch.distributed.tensor import DTensor, Partial

    return isinstance(value, DTensor) and any(
        isinstance(placement, Partial) and type(placement) is not Partial for placement in value.placements
    )


def editable(value: Any) -> Any:
    """``value``, copied where it holds a tensor that may not be changed in place.

    What a collective returns may not, while gradients flow.
    """
    frozen = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor._is_view():
            frozen.append(tensor)
        return tensor

    apply(value, note, Tensor)
    return apply(value, Tensor.clone, Tensor) if frozen else value


def add_rules(envoy: Any) -> None:
    """Record which of the standard values of ``envoy`` its ranks hold in parts, where its model is sharded."""
    fragments = envoy.interleaver.fragments
    if not isinstance(fragments, TPFragments) or not fragments.enabled or envoy.PROJECTION is None:
        return
    projection = child(envoy, envoy.PROJECTION)
    entering = None if projection is None else f"{projection.path}.input"
    if entering not in fragments.tp_rules or fragments.style_at(projection.path)[0] in SPLITS_ITS_OWN_INPUT:
        return
    from torch.distributed.tensor import Shard

    mesh, _ = fragments.tp_rules[entering]
    for name, value in envoy.values().items():
        axes = [i for i, axis in enumerate(value.dims or ()) if axis in CUT]
        if not axes or value.reason(envoy) is not None or value.inside_forward(envoy):
            continue
        reshaped = value._postprocess is not None or value._transform is not None
        fragments.tp_rules.setdefault(
            value._location(envoy),
            (mesh, f"{name} of {envoy.path} cannot be put together from its parts" if reshaped else Shard(axes[0])),
        )
