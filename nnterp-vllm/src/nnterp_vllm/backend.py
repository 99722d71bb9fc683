"""Families of transformers on vLLM's transformers backend.

vLLM runs an architecture that it has no implementation of its own for through transformers' modules, inside a root of
its own and with its attention layer, its linear layers and its norms in them. A family of transformers then says where
everything is, and only how it is served differs: here its component classes are made again on the engine's terms. A
family that exists on transformers so needs no second module.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any

from nnterp import components as standard
from nnterp.components import interface
from nnterp.components.derived import DerivedEProperty
from nnterp.components.eproperty import EProperty, unavailable
from nnterp.root import Standardized
from nnterp.sizes import StandardizedProperty
from nnterp_vllm.components import Attention, Block, Mlp, Moe, no_own_activation
from nnterp_vllm.values import on_engine


class Layer(Block, standard.Layer):
    """A block of transformers, on ``[1, tokens, hidden_size]``."""


#: What stands in for each component of transformers, the more special first.
COUNTERPARTS = {standard.Moe: Moe, standard.Attention: Attention, standard.Mlp: Mlp, standard.Layer: Layer}

#: What a family may say about a model besides its maps that holds on any engine.
SIZES = tuple(name for name, rule in vars(Standardized).items() if type(rule) is StandardizedProperty)


class Family:
    """A family of transformers on the backend: its aliases under vLLM's root, its components on the engine's terms."""

    def __init__(self, family: Any, prefix: str) -> None:
        self.family, self.prefix = family, prefix
        self.RENAME = {rerooted(native, prefix): alias for native, alias in family.RENAME.items()}
        self.ENVOYS = {kind: on_backend(component) for kind, component in family.ENVOYS.items()}

    def __getattr__(self, name: str) -> Any:
        if name in SIZES:
            return getattr(self.family, name)
        raise AttributeError(f"{self!r} has no {name!r}")

    def __repr__(self) -> str:
        return f"<{getattr(self.family, '__name__', self.family)} on vLLM's transformers backend>"

    def __reduce__(self) -> tuple:
        return Family, (self.family, self.prefix)


def rerooted(native: str, prefix: str) -> str:
    """A native path of a causal language model's, under vLLM's root, where the decoder is always ``model``."""
    return f"model.{native.removeprefix(f'{prefix}.')}" if native.startswith(f"{prefix}.") else native


def of_transformers(family: Any, config: Any) -> Family:
    """``family``, of the model that transformers builds of ``config``, on the backend."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return Family(family, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix)


@cache
def on_backend(component: type) -> type:
    """The class that serves on the engine what ``component`` serves on transformers; itself where it serves nothing.

    Requests name it by reference: as an attribute of this module, after the class that it is made of.
    """
    counterpart = next((ours for theirs, ours in COUNTERPARTS.items() if issubclass(component, theirs)), None)
    if counterpart is None:
        return component
    values = {name: served(value, name, counterpart) for name, value in component.values().items()}
    made = type(component.__name__, (counterpart, component), {**values, "__doc__": component.__doc__})
    made.__module__, made.__qualname__ = __name__, f"{component.__module__}:{component.__qualname__}".replace(".", "/")
    return made


def served(value: EProperty, name: str, counterpart: type) -> EProperty:
    """``value`` of a component of transformers, as it is served on the engine."""
    engine = counterpart.values().get(name)
    if counterpart is Moe and name not in ("mlp_output", "mlp_activation", "mlp_neurons"):
        return unavailable("transformers' mixtures run inside the engine's kernel")
    if isinstance(value.key, str) and value.key in interface.INTERIOR and counterpart is Attention:
        return engine
    if isinstance(value, DerivedEProperty) or value.key is None:
        return value
    if (
        name == "mlp_activation"
        and counterpart is Mlp
        and value._unavailable is standard.Mlp.mlp_activation._unavailable
    ):
        return on_engine(value, unavailable=no_own_activation)
    return on_engine(value)


def __getattr__(name: str) -> type:
    module, found, path = name.replace("/", ".").partition(":")
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    __import__(module)
    component: ModuleType | Any = sys.modules[module]
    for step in path.split("."):
        component = getattr(component, step)
    return on_backend(component)
