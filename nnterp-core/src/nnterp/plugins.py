"""Plugins: how a distribution brings families to nnterp. This is all that the author of one has to read.

A family is a module that says how one ``model_type`` of transformers is laid out. A distribution publishes its
families by naming a package in the entry-point group ``nnterp.families``::

    [project.entry-points."nnterp.families"]
    acme = "acme_nnterp"

and there is nothing more to it: every public module of that package is a family, named by its ``model_type`` (a dash
or a dot in the type is an underscore in the name, as in transformers' own folders). A package that wants its names
elsewhere, or that serves an engine or vision overlays, implements the hooks below and marks them with `hookimpl`::

    from nnterp.plugins import hookimpl

    @hookimpl
    def nnterp_families(engine):
        return {"acme": "acme_nnterp.families.acme"} if engine is None else {}

A hook returns names and imports no family: the package is imported at the first look-up of any type, a family's
module (and the modeling code it imports) at the first look-up of its own. A plugin that fails is skipped with one
warning, and the others work; `nnterp.families.plugins` lists them all.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pkgutil
import reprlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import importlib_metadata
import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nnterp.shipped import ENGINES, PACKAGES, module_name

PROJECT = "nnterp"
#: The entry-point group: one entry per distribution, its value the package that holds the families or the hooks.
GROUP = "nnterp.families"
#: Comma-separated entry-point names to leave out.
DISABLE = "NNTERP_DISABLE_PLUGINS"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's implementation of one of the hooks.
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def nnterp_families(engine: str | None) -> Mapping[str, str]:
    """The families the plugin has for an engine: ``{model_type: module path}``.

    ``engine`` is ``None`` for transformers, else an engine's name (``"vllm"``). For an engine the plugin knows
    nothing of, an empty mapping or ``None``.
    """


@hookspec
def nnterp_wrappers() -> Mapping[str, str]:
    """The vision overlays the plugin has: ``{wrapper model_type: module path}``."""


def public_modules(package: str) -> dict[str, str]:
    """``{name: module path}`` of a package's public modules, none of them imported.

    What a hook returns when its families are the modules of one package. Raises TypeError for a module that is no
    package.
    """
    locations = importlib.util.find_spec(package).submodule_search_locations
    if locations is None:
        raise TypeError(f"{package} is a module without hooks; a plugin is a package of families, or implements a hook")
    modules = (info.name for info in pkgutil.iter_modules(locations) if not info.ispkg)
    return {name: f"{package}.{name}" for name in modules if not name.startswith("_")}


@dataclass
class Plugin:
    """One entry of the group, as `nnterp.families.plugins` lists it.

    ``name`` is the entry point's, the one `NNTERP_DISABLE_PLUGINS` takes. ``state`` is ``"loaded"``, ``"disabled"``
    (it was not imported) or ``"skipped"``, with the reason in ``error``. ``families`` has what it serves for each
    engine that was asked about (``None`` is transformers), ``wrappers`` its vision overlays, both as ``{model type's
    module name: module path}``.
    """

    name: str
    distribution: str
    version: str
    package: str
    state: str = "loaded"
    error: str | None = None
    families: dict[str | None, dict[str, str]] = field(default_factory=dict)
    wrappers: dict[str, str] = field(default_factory=dict)

    @property
    def shipped(self) -> bool:
        """Whether the distribution is one of nnterp's own."""
        return self.distribution in PACKAGES

    @property
    def identity(self) -> str:
        """What pluggy knows the plugin by: two distributions may give their entry points the same name."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Served(NamedTuple):
    """The module that serves a type, and the plugin it comes from."""

    plugin: Plugin
    path: str


class Catalogue:
    """Every plugin installed here, and which of them serves a type. Made once, by `catalogue`, at the first look-up."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(sys.modules[__name__])
        for name in filter(None, map(str.strip, os.environ.get(DISABLE, "").split(","))):
            self._pluggy.set_blocked(name)
        self._reported: set[str] = set()
        entries: dict[str, list[importlib_metadata.EntryPoint]] = {}
        for entry in importlib_metadata.entry_points(group=GROUP):
            entries.setdefault(canonicalize_name(entry.dist.name), []).append(entry)
        # nnterp's own first and in their own order: of two plugins that serve a type, the first is used.
        order = [name for name in PACKAGES if name in entries] + sorted(entries.keys() - PACKAGES.keys())
        self.plugins = [self._load(entry, distribution) for distribution in order for entry in entries[distribution]]

    def family(self, model_type: str, engine: str | None = None) -> Served | None:
        """What serves a type on an engine, or ``None``. Raises ValueError when two third-party plugins do."""
        self._ask(engine)
        name = module_name(model_type)
        serving = [Served(p, p.families[engine][name]) for p in self.plugins if name in p.families.get(engine, ())]
        what = f"model_type {model_type!r}" + (f" on {engine}" if engine else "")
        return self._choose(what, serving, override=", pass family=, or use nnterp.families.register")

    def wrapper(self, model_type: str) -> Served | None:
        """What overlays a wrapper type, or ``None``; in the order of `family`."""
        name = module_name(model_type)
        serving = [Served(plugin, plugin.wrappers[name]) for plugin in self.plugins if name in plugin.wrappers]
        return self._choose(f"wrapper {model_type!r}", serving)

    def names(self, engine: str | None = None) -> set[str]:
        """The module names of every type served on an engine."""
        self._ask(engine)
        return {name for plugin in self.plugins for name in plugin.families.get(engine, ())}

    def engines(self) -> set[str]:
        """The engines that something was found to be served on."""
        return {engine for plugin in self.plugins for engine, served in plugin.families.items() if engine and served}

    def _load(self, entry: importlib_metadata.EntryPoint, distribution: str) -> Plugin:
        plugin = Plugin(entry.name, distribution, entry.dist.version, entry.value)
        if self._pluggy.is_blocked(entry.name):
            plugin.state = "disabled"
            return plugin
        with self._isolated(plugin):
            self._pluggy.register(entry.load(), plugin.identity)
            for engine in (None, *ENGINES):
                plugin.families[engine] = self._answer(plugin, "nnterp_families", engine=engine)
            plugin.wrappers = self._answer(plugin, "nnterp_wrappers")
            _check_core_range(plugin, entry.dist.requires or [])
        return plugin

    def _ask(self, engine: str | None) -> None:
        """Have every loaded plugin say, once, what it serves on an engine."""
        for plugin in self.plugins:
            if plugin.state == "loaded" and engine not in plugin.families:
                with self._isolated(plugin):
                    plugin.families[engine] = self._answer(plugin, "nnterp_families", engine=engine)

    def _answer(self, plugin: Plugin, hook: str, **arguments: str | None) -> dict[str, str]:
        """One plugin's answer to one hook; a package without any hook answers with its modules."""
        package = self._pluggy.get_plugin(plugin.identity)
        implemented = {caller.name for caller in self._pluggy.get_hookcallers(package)}
        if hook not in implemented:
            bare = not implemented and arguments == {"engine": None}
            return _unreserved(public_modules(package.__name__)) if bare else {}
        others = self._pluggy.get_plugins() - {package}
        # pluggy leaves an answer of None out.
        answer = next(iter(self._pluggy.subset_hook_caller(hook, others)(**arguments)), None)
        if answer is None and arguments.get("engine") is not None:
            return {}
        if not isinstance(answer, Mapping) or not all(
            isinstance(part, str) for pair in answer.items() for part in pair
        ):
            raise TypeError(f"{hook} returned {reprlib.repr(answer)}, not a mapping of model_type to module path")
        named = {module_name(model_type): path for model_type, path in answer.items()}
        return _unreserved(named) if arguments == {"engine": None} else named

    @contextmanager
    def _isolated(self, plugin: Plugin) -> Iterator[None]:
        """Skip the plugin with a warning when its code fails."""
        try:
            yield
        except (Exception, SystemExit) as error:
            # Somebody else's code, which may raise anything: one broken plugin must not take the others with it.
            plugin.state, plugin.error = "skipped", f"{type(error).__name__}: {error}"
            plugin.families, plugin.wrappers = {}, {}
            if self._pluggy.has_plugin(plugin.identity):
                self._pluggy.unregister(name=plugin.identity)
            warnings.warn(f"nnterp skips the plugin {plugin.name!r} of {plugin}: {plugin.error}", stacklevel=2)

    def _choose(self, what: str, serving: list[Served], override: str = "") -> Served | None:
        """The one place that decides between several plugins that serve a type."""
        if len(serving) < 2:
            return serving[0] if serving else None
        first, *others = serving
        named = " and ".join(f"{each.path} of {each.plugin}" for each in others)
        if not first.plugin.shipped:
            disable = " or ".join(f"{DISABLE}={each.plugin.name}" for each in serving)
            raise ValueError(
                f"{first.path} of {first.plugin} and {named} both serve {what}: leave one out with {disable}{override}"
            )
        if what not in self._reported:
            self._reported.add(what)
            warnings.warn(
                f"{first.path} of {first.plugin} is used for {what}, which {named} serves too. To choose the other, "
                f"set {DISABLE}={first.plugin.name}{override}",
                stacklevel=4,
            )
        return first


def _unreserved(served: dict[str, str]) -> dict[str, str]:
    """``served``, whose names become attributes of `nnterp.families`: ValueError where one is its own already."""
    package = sys.modules["nnterp.families"]
    for name in served:
        if name in ("default", *ENGINES) or (name in vars(package) and f"{package.__name__}.{name}" not in sys.modules):
            raise ValueError(
                f"{served[name]} would be nnterp.families.{name}, which is something else: a family or a "
                f"public module of a plugin cannot have that name (a private one starts with an underscore)"
            )
    return served


def _check_core_range(plugin: Plugin, requires: list[str]) -> None:
    """Warn when the plugin was built for another core than the one installed, as its own metadata says."""
    core = importlib_metadata.version("nnterp-core")
    for requirement in map(Requirement, requires):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) != "nnterp-core" or not applies:
            continue
        if not requirement.specifier.contains(core, prereleases=True):
            warnings.warn(
                f"{plugin} was built for nnterp-core{requirement.specifier}, and nnterp-core {core} is installed; "
                f"nnterp loads its plugin {plugin.name!r} all the same",
                stacklevel=4,
            )


@functools.cache
def catalogue() -> Catalogue:
    """The plugins installed here, discovered at the first call."""
    return Catalogue()
