"""Sizes and capabilities of a standardized model: a plain rule, which the family's module can replace."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


class StandardizedProperty:
    """A fact about the whole model, such as ``hidden_size``.

    Read in and outside a trace. A function of the same name in the family's module, called with the model, answers
    instead of the plain rule; that is the one place where a size is spelled otherwise, so assigning raises
    AttributeError. A fact, not a value: it has no location, no layout and no row in ``support()``.
    """

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        self.rule = rule
        self.name = rule.__name__
        self.__doc__ = rule.__doc__

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return self
        return (getattr(model.family, self.name, None) or self.rule)(model)

    def __set__(self, model: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.name} is read off the checkpoint: a family that spells it otherwise defines "
            f"`def {self.name}(model)` in its module"
        )


class StandardizedCapability(StandardizedProperty):
    """A method of a residual-stream tensor, such as ``project_on_vocab``, that the family's module can replace.

    It runs modules, so calling it loads the weights of a model that has none yet. Raises ValueError for a tensor of
    another width than the stream's.
    """

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return self
        return partial(self._run, model)

    def _run(self, model: Any, hidden: Any) -> Any:
        width = model.hidden_size
        if not isinstance(hidden, Tensor) or hidden.dim() == 0 or hidden.shape[-1] != width:
            got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(f"{self.name} of {model.path} takes a tensor [..., hidden_size {width}], not {got}")
        if not model.dispatched:
            model.dispatch()
        return (getattr(model.family, self.name, None) or self.rule)(model, hidden)


def text_config(model: Any) -> Any:
    """The config of the text model, which is the whole config on a checkpoint that is text alone."""
    return model._module.config.get_text_config()
