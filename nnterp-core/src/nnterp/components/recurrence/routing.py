"""Choosing the kernels: which function a family's mixers run through, and the size of a scan's chunks."""

import sys
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from nnterp import order
from nnterp.components.recurrence.mixer import RecurrentMixer
from nnterp.components.recurrence.sources import PER_TOKEN, plain
from nnterp.components.recurrence.state_space import StateSpace

#: (modeling module, name) -> what the name was bound to at import.
_originals: dict[tuple[str, str], Any] = {}


def kernel_names(family: Any) -> dict[tuple[str, str], str]:
    """The names of a family's kernels: (modeling module, name) -> the name of the kernel that a decode step uses.

    Of a family module (or anything with ``ENVOYS``), what its mixers say; of a modeling module, every name in it that
    some mixer calls a kernel.
    """
    if isinstance(family, ModuleType) and not hasattr(family, "ENVOYS"):
        pairs = {(kind.CHUNK_KERNEL, kind.RECURRENT_KERNEL) for kind in mixers(RecurrentMixer) if kind.CHUNK_KERNEL}
        return {
            (family.__name__, name): step for prompt, step in pairs for name in (prompt, step) if hasattr(family, name)
        }
    found = {}
    for native, kind in family.ENVOYS.items():
        if isinstance(kind, type) and issubclass(kind, RecurrentMixer) and not isinstance(native, str):
            module = native.__module__
            for name in (kind.CHUNK_KERNEL, kind.RECURRENT_KERNEL):
                if hasattr(sys.modules[module], name):
                    found[module, name] = kind.RECURRENT_KERNEL
    return found


def has_mixers(family: Any) -> bool:
    """Whether a family has recurrent mixers, with kernels to route or without."""
    kinds = getattr(family, "ENVOYS", {}).values()
    return any(isinstance(kind, type) and issubclass(kind, RecurrentMixer) for kind in kinds)


def mixers(kind: type) -> list[type]:
    """``kind`` and every class made from it."""
    return [kind, *(found for subclass in kind.__subclasses__() for found in mixers(subclass))]


def route_kernels(family: Any, kernel: str = "torch") -> None:
    """Bind a family's recurrent kernels, for every model of it in this process, from the next run on.

    ``"torch"`` binds each name to transformers' own function, whatever compiled package is installed: slower, and what
    the state after every token needs. Where a decode step runs through a loop over tokens (a gated DeltaNet), a prompt
    is bound to that loop too. ``"default"`` restores what was bound at import. A mixer whose recurrence is a method
    (RG-LRU) has no name to bind, and stays what it is.

    Args:
        family: ``model.family``, or the modeling module of transformers that its mixers are defined in.
        kernel: ``"torch"`` or ``"default"``.

    Raises ValueError for another word, or for a family without recurrent mixers.
    """
    if kernel not in ("torch", "default"):
        raise ValueError(f'route_kernels takes "torch" or "default", not {kernel!r}')
    names = kernel_names(family)
    if not names and not has_mixers(family):
        raise ValueError(f"{getattr(family, '__name__', family)} has no recurrent mixer whose kernels could be routed")
    for (module, name), step in names.items():
        original = _originals.setdefault((module, name), getattr(sys.modules[module], name))
        if kernel == "torch":
            prompt, decode = plain(original), plain(_original(module, step))
            loop_for_both = decode.__name__ in PER_TOKEN and prompt.__name__ not in PER_TOKEN
            original = decode if loop_for_both else prompt
        setattr(sys.modules[module], name, original)
    order.invalidate()


def _original(module: str, name: str) -> Any:
    return _originals.get((module, name), getattr(sys.modules[module], name))


def route_delta_rule(family: Any, kernel: str = "recurrent") -> None:
    """`route_kernels` in the words of a gated DeltaNet: ``"recurrent"`` is ``"torch"``, ``"chunked"`` ``"default"``.

    Raises ValueError for another word.
    """
    words = {"recurrent": "torch", "chunked": "default"}
    if kernel not in words:
        raise ValueError(f'route_delta_rule takes "recurrent" or "chunked", not {kernel!r}')
    route_kernels(family, words[kernel])


_chunk_sizes: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


def chunk_per_token(model: Any, enabled: bool = True) -> None:
    """Have every Mamba-2 mixer of ``model`` scan in chunks of one token, so that its `states` are held.

    The outputs are the same to rounding; time and memory grow with the square of the tokens. On this model alone, from
    the next run on; ``enabled=False`` restores the sizes that the mixers were built with. A model that is not loaded
    yet is loaded first. Raises ValueError for a model without such a mixer.
    """
    found = [envoy for envoy in model.modules() if isinstance(envoy, StateSpace)]
    if not found:
        raise ValueError(f"{type(model._module).__name__} has no Mamba-2 mixer (StateSpace) whose chunks could be set")
    if not model.dispatched:
        model.dispatch()
    for mixer in found:
        module = mixer._module
        built = _chunk_sizes.setdefault(module, module.chunk_size)
        module.chunk_size = 1 if enabled else built
    order.invalidate()
