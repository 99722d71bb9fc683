"""What the envoys of a block share: their values, why some are missing, and where the values they add are served."""

import difflib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from greenlet import getcurrent
from nnsight import Envoy
from nnsight.intervention.source import STATE, State, install_source, instrument, make_op
from torch import nn

from nnterp.components import runs
from nnterp.components.definitions import CannotTap
from nnterp.components.eproperty import EProperty, Unavailable, role
from nnterp.components.locations import refuse_late
from nnterp.components.sharded import add_rules
from nnterp.components.taps import Rule, tapped

#: The attribute of a copy of a forward that says which locations it serves.
LOCATIONS = "__nnterp_locations__"

#: A class's forward -> per locations, the copy that serves them or the reason there is none.
_copies: "weakref.WeakKeyDictionary[Callable, dict[tuple, Callable | str]]" = weakref.WeakKeyDictionary()


def operations(state: State) -> Callable:
    """The forward with nnsight's operations alone, as `install_source` builds it."""
    return instrument(state.original, make_op(lambda: state.active()[:2]))[0]


class NoSuchName(AttributeError):
    """An attribute that neither an envoy nor its module has.

    The words are found when they are shown: nnsight asks every envoy for names that most do not have.
    """

    def __init__(self, envoy: Any, name: str) -> None:
        super().__init__(name=name, obj=envoy)

    def __str__(self) -> str:
        return self.obj._unknown(self.name)


class Standard(Envoy):
    """An envoy that carries standard values.

    Attributes:
        sourced: Whether nnsight's operations of this module's forward (``source``) are there from the start of every
            run. A class whose values are such operations sets it; without it, an operation can only be read from the
            first call of a run on.
        TAPS: Locations that this class adds inside its module's forward, each with the rule that places it
            (`nnterp.components.taps`). Served under the location's name.
        METHODS: The same for methods of the module that its forward calls: the locations in each, by its name.
        PROJECTION: The child that sums over this module's heads or neurons. On a tensor-parallel load it says whether
            each rank holds its own of them (`nnterp.components.sharded`).
        refused: Values that this module turned out not to have although its class does, with the reason: what a run of
            it has shown (`nnterp.inspection`).
    """

    sourced: bool = False
    refused: Mapping[str, str] = {}
    TAPS: Mapping[str, Rule] = {}
    METHODS: Mapping[str, Mapping[str, Rule]] = {}
    PROJECTION: str | None = None
    ROLE = "module"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for native in self._other_parts():
            self.__dict__.pop(native, None)
        self._renew()

    def _update(self, module: nn.Module) -> None:
        super()._update(module)
        self._renew()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if not hasattr(self.interleaver, "stale"):
            self.arrive()

    def arrive(self) -> None:
        """Serve from here on: this envoy was rebuilt in a process that runs a plain model."""
        runs.always()
        self.install()

    def _renew(self) -> None:
        self.interleaver.stale = True

    # -- values -----------------------------------------------------------------------------------------------------

    @classmethod
    def values(cls) -> dict[str, EProperty]:
        """The standard values of this class by name, base classes first."""
        found = {}
        for klass in reversed(cls.__mro__):
            for name, attribute in vars(klass).items():
                if isinstance(attribute, EProperty):
                    found[name] = attribute
                else:
                    found.pop(name, None)
        return found

    def support(self) -> dict[str, str | None]:
        """Why each value is unavailable here, or None where it is available. Runs nothing."""
        return {name: value.reason(self) for name, value in self.values().items()}

    # -- locations inside the forward ---------------------------------------------------------------------------------

    def _other_parts(self) -> list[str]:
        """The native names of children that are another part of a block, by which they do not go."""
        return [native for part, native in self._aliases.items() if part in PARTS and native in PARTS]

    def natives(self) -> dict[str, str]:
        """The native name of each child, by standard name."""
        return {alias: path for alias, path in self._aliases.items() if "." not in path}

    def install(self) -> None:
        """Put this envoy's locations in its module's forward. Called when a run starts; does nothing where they are."""
        add_rules(self)
        for name in self.METHODS:
            self._tapped_method(name)
        if self.sourced:
            install_source(self)
        if not self.TAPS:
            return
        state = self._module.__dict__[STATE]
        present = getattr(state.body, LOCATIONS, None)
        if present == self._locations():
            return
        body = state.body
        if present is not None:  # another class wraps this module too: start from what its copy was made of
            body = operations(state) if state.sourced else state.original
        copy_ = self._tapped(body)
        if not isinstance(copy_, str):
            state.body = copy_

    def _locations(self) -> tuple:
        """What a copy of the forward serves: this class's locations, with the native names they are placed by."""
        return type(self), tuple(self.natives().items())

    def _tapped(self, function: Callable) -> Callable | str:
        """The copy of ``function`` that serves, or the reason there is none. One copy for all modules of a class."""
        shared = function is getattr(type(self._module), "forward", None)
        return self._copy(function, self.TAPS, _copies.setdefault(function, {}) if shared else {})

    def _tapped_method(self, name: str) -> Callable | str:
        """The copy of the module's method ``name`` that serves, during runs in its place; or why there is none."""
        owner = next(klass for klass in type(self._module).__mro__ if name in vars(klass))

        def copied(plain: Callable) -> Callable | str:
            return self._copy(plain, self.METHODS[name], _copies.setdefault(plain, {}))

        def serving(plain: Callable) -> Callable:
            return plain if isinstance(copied(plain), str) else copied(plain)

        return copied(runs.during_runs(owner, name, serving))

    def _copy(self, function: Callable, rules: Mapping[str, Rule], copies: dict) -> Callable | str:
        key = self._locations()
        if key not in copies:
            try:
                copies[key] = tapped(function, rules, self.natives())
                setattr(copies[key], LOCATIONS, key)
            except CannotTap as error:
                copies[key] = f"its forward is not written the way this value is found in it: {error}"
        return copies[key]

    def tap_reason(self, location: str) -> str | None:
        """Why ``location`` is not served although `TAPS` or `METHODS` names it, or None."""
        method = next((name for name, rules in self.METHODS.items() if location in rules), None)
        if method is not None:
            copy_ = self._tapped_method(method)
        elif location in self.TAPS:
            copy_ = self._tapped(self._module.__dict__[STATE].original)
        else:
            return None
        return copy_ if isinstance(copy_, str) else None

    @property
    def source(self) -> Any:
        """nnsight's operations of this module's forward; the standard locations stay where they are.

        Raises SourceNotAvailable where they are first asked for at a late step of a run: nnsight counts an operation
        from then on, and would answer with another step's.
        """
        refuse_late(f"{self.path}.source", type(self).__name__, self)
        found = Envoy.source.fget(self)
        self.install()
        return found

    # -- errors -----------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """As on any envoy, but a name that means nothing is refused while the model runs: the edit would be lost."""
        if name.startswith("_"):
            return super().__setattr__(name, value)
        in_a_run = getattr(getcurrent(), "mediator", None) is not None
        if in_a_run and not isinstance(value, (nn.Module, Envoy)):
            held = self.__dict__.get(name)
            if isinstance(held, Envoy):
                raise AttributeError(
                    f"{held.path} is a module, which no value can take the place of: assign its output or input, or a "
                    f"value of it ({', '.join(getattr(type(held), 'values', dict)()) or 'it has none'})"
                )
            if name not in self.__dict__ and not hasattr(type(self), name):
                raise NoSuchName(self, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in PARTS and name in self._other_parts():
            raise NoSuchName(self, name)
        try:
            found = super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):
                raise
            raise NoSuchName(self, name) from error
        if found is None and name in PARTS:  # a place for one that the module leaves empty
            raise NoSuchName(self, name)
        return found

    def _unknown(self, name: str) -> str:
        kind = type(self._module).__name__
        message = f"{self.path} ({kind}) has no {name!r}"
        if name in STANDARD_CHILDREN:
            message = f"no {name} module on this {role(self)}: {self.path} ({kind})"
        others = self._other_parts()
        known = [each for each in (*self.values(), *self._aliases, *self._child_map) if each not in others]
        close = difflib.get_close_matches(name, known, n=3)
        if close:
            return f"{message}. Did you mean {', '.join(close)}?"
        return f"{message}. Its values: {', '.join(self.values()) or 'none'}; its modules: {', '.join(self._child_map)}"


#: What a block's parts are called. A part whose native name is that of another (a recurrent mixer under ``self_attn``)
#: answers to its alias alone: what the native name stands for on other models is not here.
PARTS = ("self_attn", "linear_attn", "mlp")

#: Names that some block has and another has not; asking for one that is missing is worth its own words.
STANDARD_CHILDREN = (
    "self_attn",
    "cross_attn",
    "linear_attn",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "o_proj",
    "act_fn",
    "down_proj",
)


class Blocks(Envoy):
    """A list of modules that says how long it is when an index is past its end.

    A value is an entry's, never the list's: a read or an assignment raises Unavailable saying so.
    """

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except AttributeError:
            if not isinstance(key, int):
                raise
            raise IndexError(
                f"{self.path}[{key}]: there are {len(self)} blocks, 0 to {len(self) - 1} (or {-len(self)} to -1)"
            ) from None

    def values(self) -> dict[str, EProperty]:
        """The standard values that its entries have, by name."""
        entry = next(iter(self.__dict__.get("_child_map", {}).values()), None)
        return entry.values() if isinstance(entry, Standard) else {}

    def reason(self, value: str) -> str:
        """Why ``value``, which its entries have, is not the list's."""
        name = self.path.rsplit(".", 1)[-1]
        return f"{name} is a list of {len(self)}: {name}[0].{value} to {name}[{len(self) - 1}].{value} are its entries'"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith("_") and name in self.values():
                raise Unavailable(f"{name} of {self.path} is unavailable: {self.reason(name)}") from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self.__dict__ and name in self.values():
            raise Unavailable(f"{name} of {self.path} is unavailable: {self.reason(name)}")
        super().__setattr__(name, value)


def axis_size(envoy: Envoy, axis: str) -> int:
    """The size of layout axis ``axis`` of a value that ``envoy`` serves.

    An axis that is a fact about the model has the name of the size that holds it, so its size is that attribute: on
    ``envoy`` when its class declares it (an attention's ``num_heads`` is that block's own), else on the first envoy
    above it whose class does, up to the model. An attribute of the wrapped module that happens to share the name never
    counts.

    Raises ValueError where no envoy up to the root holds such a size (``batch``, ``seq``, ``query``, ``key``: the size
    is the tensor's).
    """
    host: Envoy | None = envoy
    while host is not None:
        declared = getattr(type(host), axis, None)
        if declared is not None and not isinstance(declared, EProperty) and hasattr(declared, "__get__"):
            return getattr(host, axis)
        host = host.parent
    raise ValueError(
        f"axis {axis!r} of a value on {envoy.path} is not a fact about the model: no envoy from there up to the root "
        f"holds a size by that name"
    )


# -- what a list of blocks has ----------------------------------------------------------------------------------------


def standard_children(envoy: Envoy) -> dict[str, Standard]:
    """The children of ``envoy`` that carry standard values, under their standard names (an alias before a native
    name).
    """
    found: dict[int, tuple[str, Standard]] = {}
    for alias in envoy._aliases:
        child = envoy.__dict__.get(alias)
        if isinstance(child, Standard):
            found.setdefault(id(child), (alias, child))
    for name, child in envoy._named_children():
        if isinstance(child, Standard):
            found.setdefault(id(child), (name, child))
    return dict(found.values())


def lists_of(block: Standard) -> dict[str, Blocks]:
    """The children of a block that are lists of modules with standard values (two attentions), by name."""
    lists = {name: child for name, child in block._named_children() if isinstance(child, Blocks)}
    return {name: child for name, child in lists.items() if child.values()}


def hosts_of(block: Standard) -> dict[str, Standard]:
    """The envoys in a block that carry standard values: its children, the entries of a list as ``self_attn.0``."""
    found = standard_children(block)
    for name, entries in lists_of(block).items():
        found.update({f"{name}.{index}": entry for index, entry in enumerate(entries)})
    return found


def block_support(block: Standard) -> dict[str, str | None]:
    """Why each value of one block is unavailable, or None; children's values as ``"self_attn.attention_output"``."""
    rows = block.support()
    for name, child in hosts_of(block).items():
        rows.update({f"{name}.{value}": reason for value, reason in child.support().items()})
    for name, entries in lists_of(block).items():
        rows.update({f"{name}.{value}": entries.reason(value) for value in entries.values()})
    return rows


def every_row(blocks: Iterable[Standard]) -> list[dict[str, str | None]]:
    """`block_support` of each block with the same rows in each: what some block has and another lacks says so there.

    TypeError where a block is no `Standard`.
    """
    blocks = list(blocks)
    for block in blocks:
        if not isinstance(block, Standard):
            raise TypeError(
                f"{block.path} ({type(block._module).__name__}) carries no values: the family's ENVOYS have no entry "
                f"for its type"
            )
    rows = [block_support(block) for block in blocks]
    names = list(dict.fromkeys(name for row in rows for name in row))
    for block, row in zip(blocks, rows, strict=True):
        children = {**hosts_of(block), **lists_of(block)}
        for name in names:
            if name not in row:
                host, _, value = name.rpartition(".")
                missing = bool(host) and host not in children
                row[name] = (
                    f"no {host} module on this {role(block)}"
                    if missing
                    else f"no {value} value on this {role(block)}'s {host or 'class'}"
                )
        row.update({name: row.pop(name) for name in names})
    return rows


def blocks_support(blocks: Iterable[Standard]) -> dict[str, str | dict[int, str] | None]:
    """Per value: None when every block has it, else ``{index: reason}`` of the blocks that do not."""
    rows = every_row(blocks)
    merged: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        reasons = {index: row[name] for index, row in enumerate(rows) if row[name] is not None}
        merged[name] = reasons or None
    return merged
