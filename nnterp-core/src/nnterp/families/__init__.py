"""Families: from a ``model_type`` to the module that says how such a model is laid out.

The families live in plugins (`nnterp.plugins`), and this package makes them look like its own modules.
``nnterp.families.gpt2``, ``from nnterp.families import gpt2`` and ``import nnterp.families.gpt2`` give the plugin's
module itself, so a family has one identity however it is spelled; another engine's families are
``nnterp.families.vllm.llama``. No plugin is imported before it is asked for: the first look-up discovers them, and a
look-up imports that one family and the transformers modeling module it names. `default` alone, the core's own, comes
with nnterp.

A name that is no family here is one that no installed plugin serves. `lookup` then answers with `default`, which does
its best on any decoder, and says which package to install where nnterp ships one for the type.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nnterp.shipped import ENGINES, install, module_name, package_for

if TYPE_CHECKING:
    from nnterp.plugins import Catalogue, Plugin, Served

__all__ = [
    "REGISTRY",
    "MissingModeling",
    "UnsupportedFamily",
    "all_families",
    "default",
    "known",
    "lookup",
    "plugins",
    "register",
    "wrapper",
]

#: What `register` put in: a family by ``model_type``, or by ``"<engine>.<model_type>"``. Consulted before any plugin;
#: ``del`` undoes.
REGISTRY: dict[str, Any] = {}


class UnsupportedFamily(ValueError):
    """Nothing standardizes the checkpoint: no family serves it, and the best-effort default cannot either."""


class MissingModeling(ImportError):
    """A family is installed whose modeling module the installed transformers does not have."""


def lookup(model_type: str, engine: str | None = None) -> Any:
    """The family that serves a ``model_type``, imported.

    A registered family comes first, then nnterp's own plugins, then the others. Without one, `default` and a warning
    on transformers; on another engine, which has no default, `UnsupportedFamily`. Raises ValueError when two
    third-party plugins serve the type, `MissingModeling` when the installed transformers lacks what the family names,
    and whatever error the family's module raises.
    """
    name = module_name(model_type)
    for spelling in (model_type, name):
        if _key(spelling, engine) in REGISTRY:
            return REGISTRY[_key(spelling, engine)]
    if _catalogue().family(model_type, engine) is not None:
        return importlib.import_module(f"{__name__}.{_key(name, engine)}")
    if engine is not None:
        raise UnsupportedFamily(f"no family for model_type {model_type!r} on {engine}{_advice(name, engine)}")
    warnings.warn(
        f"no family for model_type {model_type!r}: the best-effort default family is used, and model.support() says "
        f"what it serves{_advice(name)}",
        stacklevel=2,
    )
    return importlib.import_module(f"{__name__}.default")


def known(engine: str | None = None) -> list[str]:
    """The types that the installed plugins serve on an engine, by their modules' names, sorted. Imports no family."""
    return sorted(_catalogue().names(engine))


def all_families() -> list[ModuleType]:
    """Every family of `known`, imported, but those whose modeling module the installed transformers does not have."""
    families = []
    for name in known():
        with contextlib.suppress(MissingModeling):
            families.append(importlib.import_module(f"{__name__}.{name}"))
    return families


def register(family: Any, *model_types: str, engine: str | None = None) -> Any:
    """Have `lookup` answer with ``family`` for the types, whatever the plugins serve. Returns the family.

    Without types, the type is the last part of the family's ``__name__``, as a family module is named; TypeError for
    an object without a name.
    """
    if not model_types:
        name = getattr(family, "__name__", None)
        if name is None:
            raise TypeError(f"{family!r} has no __name__ to take the model_type from: register(family, 'model_type')")
        model_types = (name.rpartition(".")[2],)
    for model_type in model_types:
        REGISTRY[_key(model_type, engine)] = family
    return family


def plugins() -> list[Plugin]:
    """Every installed plugin with its distribution, version, state and what it serves (`nnterp.plugins.Plugin`)."""
    return list(_catalogue().plugins)


def wrapper(model_type: str) -> ModuleType | None:
    """The vision overlay of a multimodal wrapper's ``model_type``, imported, or ``None`` where no plugin has one."""
    served = _catalogue().wrapper(model_type)
    return None if served is None else _import_served(served, model_type)


def _catalogue() -> Catalogue:
    # Imported here so that `import nnterp` reads no metadata and loads no plugin machinery.
    from nnterp.plugins import catalogue

    return catalogue()


def _key(name: str, engine: str | None) -> str:
    return name if engine is None else f"{engine}.{name}"


def _advice(name: str, engine: str | None = None) -> str:
    """What to do about a type that nothing serves, where one of nnterp's own packages would."""
    distribution = package_for(name, engine)
    plugin = next((each for each in plugins() if each.distribution == distribution), None)
    if distribution is None or (plugin is not None and plugin.state == "loaded"):
        return ""
    if plugin is None:
        return f"; {distribution} serves it: {install(distribution)}"
    return f"; {plugin} serves it, and is {plugin.state} here ({plugin.error or 'NNTERP_DISABLE_PLUGINS'})"


def _import_served(served: Served, name: str) -> ModuleType:
    try:
        return importlib.import_module(served.path)
    except ImportError as error:
        # transformers.models.<name>, or a modeling module inside it; any other failed import is the family's own error.
        if not (error.name or "").startswith("transformers.models."):
            raise
        import transformers

        raise MissingModeling(
            f"{served.path} of {served.plugin}, the family of {name!r}, needs a transformers that has {error.name}; "
            f"transformers {transformers.__version__} is installed ({error})",
            name=error.name,
        ) from error


class _FamilyLoader(Loader):
    """Loads ``nnterp.families.<name>`` as the plugin's own module."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def exec_module(self, module: ModuleType) -> None:
        # The import system hands on what it finds in sys.modules after this, so the module made for this name is
        # dropped and the plugin's own keeps its __spec__ and __name__.
        sys.modules[module.__name__] = _import_served(self.served, module.__name__.rpartition(".")[2])


class _EngineLoader(Loader):
    """Loads ``nnterp.families.<engine>``: a package without files, whose modules are that engine's families."""

    def exec_module(self, module: ModuleType) -> None:
        engine = module.__name__.rpartition(".")[2]
        module.__doc__ = f"The families of the {engine} engine."
        module.__getattr__ = _family_attributes(module.__name__, engine)
        module.__dir__ = lambda: known(engine)


class _Finder(MetaPathFinder):
    """Finds families in plugins. Comes last on the path, so a file of this package (`default`) is found before."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if not f"{parent}.".startswith(f"{__name__}.") or name.startswith("_"):
            return None
        engine = parent[len(__name__) + 1 :] or None
        served = _catalogue().family(name, engine)
        if served is not None:
            return ModuleSpec(fullname, _FamilyLoader(served), origin=served.path)
        if engine is None and _is_engine(name):
            return ModuleSpec(fullname, _EngineLoader(), is_package=True)
        if advice := _advice(name, engine):
            # Not ModuleNotFoundError: `from nnterp.families import name` would drop that one, and the advice with it.
            raise ImportError(f"no family {_key(name, engine)!r}{advice}", name=fullname)
        return None


def _is_engine(name: str) -> bool:
    return name in ENGINES or name in _catalogue().engines()


def _family_attributes(package: str, engine: str | None) -> Callable[[str], ModuleType]:
    """A module ``__getattr__`` that imports ``package``'s families as they are named."""

    def __getattr__(name: str) -> ModuleType:
        if not name.startswith("_"):
            if name in _catalogue().names(engine) or (engine is None and _is_engine(name)):
                return importlib.import_module(f"{package}.{name}")
            if advice := _advice(name, engine):
                raise AttributeError(f"no family {_key(name, engine)!r}{advice}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


_plugin_family = _family_attributes(__name__, None)


def __getattr__(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.default") if name == "default" else _plugin_family(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *known(), *_catalogue().engines()})


sys.meta_path.append(_Finder())
