"""Sizes read off a module: its own attribute under one of several spellings, or the width of a projection."""

from typing import Any

from nnterp.components.locations import child


def module_int(envoy: Any, *names: str) -> int | None:
    """The first of ``names`` that the wrapped module holds as an int, or None."""
    for name in names:
        value = getattr(envoy._module, name, None)
        if isinstance(value, int):
            return value
    return None


def in_width(envoy: Any, projection: str, size: str) -> int:
    """The input width of the child ``projection``; NotImplementedError naming ``size`` where there is none to read."""
    module = getattr(child(envoy, projection), "_module", None)
    width = getattr(module, "in_features", None)
    if width is None and getattr(module, "nf", None) is not None:  # transformers' Conv1D keeps [in, out]
        width = module.weight.shape[0]
    if width is None:
        raise NotImplementedError(
            f"{size} of {envoy.path} ({type(envoy._module).__name__}): the module does not say it and has no "
            f"{projection} to read it off; the family has to define it"
        )
    return width


def out_width(envoy: Any, projection: str) -> int | None:
    """The output width of the child ``projection``, or None where there is no such linear layer."""
    return getattr(getattr(child(envoy, projection), "_module", None), "out_features", None)
