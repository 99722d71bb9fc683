"""Values computed from other values, when they are read."""

from collections.abc import Callable
from typing import Any

from nnterp.components.eproperty import EProperty, Reason


class DerivedEProperty(EProperty):
    """A value computed from other served values, in the trace, when it is read. Read-only.

    Args:
        compute: ``compute(envoy)``, called at each read; it may read any number of values in forward order. Its return
            annotation is the layout.
        description: One line for the repr.
        unavailable: As for `EProperty`.
        instead: What to assign to change this value, for the error an assignment raises (AttributeError).
    """

    def __init__(
        self,
        compute: Callable[[Any], Any],
        description: str | None = None,
        unavailable: Reason = None,
        instead: str | None = None,
    ) -> None:
        EProperty.__init__(self, None, description, unavailable)
        self.compute = compute
        self.instead = instead
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self.key = None  # it is computed, and has no location of its own

    @property
    def _annotated(self) -> Callable | None:
        return self.compute

    def inside_forward(self, obj: Any = None) -> bool:
        return False

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        self._in_this_run(obj)
        try:
            return self.compute(obj)
        except AttributeError as error:
            raise RuntimeError(f"reading {self.name} of {obj.path} failed: {error}") from error

    def __set__(self, obj: Any, value: Any) -> None:
        hint = f"; assign {self.instead}" if self.instead else ""
        raise AttributeError(f"{self.name} of {obj.path} is derived and read-only{hint}")
