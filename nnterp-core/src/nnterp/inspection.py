"""What a model that no family describes is like, seen by running it on shapes.

`nnterp.families.default` goes by names that it has only read. Here they are held against the forward: whether the
blocks run once each and hand on a stream, and whether each value is served where its name says, once, in its layout.
"""

from contextlib import suppress
from typing import Any, NamedTuple

from nnsight.intervention.interleaver import OutOfOrderError
from torch import nn

from nnterp.components import NOT_ON_INTERFACE, EProperty, Layer, Standard, axis_size, interface, standard_children
from nnterp.families import UnsupportedFamily
from nnterp.probing import ROWS, TOKENS, shapes_only, token_ids, untouched
from nnterp.sizes import text_config

#: The root's modules, without which the standard names mean nothing.
REQUIRED = ("embed_tokens", "layers", "norm", "lm_head")

#: Sizes of the run itself.
OF_THE_RUN = {"batch": ROWS, "seq": TOKENS, "query": TOKENS, "key": TOKENS}


class Seen(NamedTuple):
    """What one run showed.

    Attributes:
        shapes: The shape of each value that was served: by the envoy that hosts it, then by name.
        failures: Why a value that was served could not be read, by envoy and name.
        counts: How often each location was served, in the order of the forward.
    """

    shapes: dict[Standard, dict[str, tuple[int, ...]]]
    failures: dict[tuple[Standard, str], str]
    counts: dict[str, int]


# -- names ------------------------------------------------------------------------------------------------------------


def require_modules(model: Any) -> None:
    """Raise UnsupportedFamily where the root lacks a standard module, or its blocks are no blocks."""
    missing = [name for name in REQUIRED if name not in model._aliases and name not in model._child_map]
    if missing:
        found = {path: name for name in missing if (path := candidate(model._module, name)) is not None}
        advice = f"if they are the modules meant, pass rename={found}" if found else "nothing in it looks like one"
        raise refusal(
            model,
            f"it has no module that goes by the name {' or '.join(missing)}; {advice}. A family, a few lines that name "
            f"its modules, serves it: see 'Writing a plugin' in nnterp-core's documentation",
        )
    if not all(isinstance(block, Layer) for block in model.layers):
        raise refusal(
            model, f"the entries of {model.layers.path} are no blocks (Layer): envoys= or rename= say otherwise"
        )


def candidate(module: nn.Module, name: str) -> str | None:
    """The path of the module that looks like the standard ``name``: by transformers' word, or by where it is."""
    paths = {id(child): path for path, child in module.named_modules()}
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    blocks = max(lists, key=lambda each: sum(1 for _ in each.parameters()), default=None)
    if name == "layers":
        return paths.get(id(blocks))
    if name != "norm":
        asked = {"embed_tokens": module.get_input_embeddings, "lm_head": module.get_output_embeddings}
        return paths.get(id(asked[name]()))
    container = module.get_submodule(paths[id(blocks)].rpartition(".")[0]) if blocks is not None else module
    norms = [child for child in container.children() if "norm" in type(child).__name__.lower()]
    return paths[id(norms[-1])] if norms else None


def refusal(model: Any, why: str) -> UnsupportedFamily:
    kind = text_config(model).model_type
    return UnsupportedFamily(f"the best-effort family cannot serve {type(model._module).__name__} ({kind!r}): {why}")


# -- the run ----------------------------------------------------------------------------------------------------------


def look(model: Any) -> Seen:
    """Run the model on shapes, reading every value that its classes have; UnsupportedFamily where it does not run."""
    hosts = [model, *(host for block in model.layers for host in (block, *standard_children(block).values()))]
    seen = Seen({host: {} for host in hosts}, {}, {})
    for host in hosts:
        host.refused, host.shapes = {}, seen.shapes[host]
    values = [
        (host, name, value)
        for host in hosts
        for name, value in host.values().items()
        if value.layout is not None and value.reason(host) is None
    ]
    try:
        with untouched(model) as counts, shapes_only(model), model.scan() as tracer:
            with tracer.invoke(token_ids(model)):
                pass
            for host, name, value in values:
                with tracer.invoke():
                    read(host, name, value, seen)
            for block in model.layers:
                with tracer.invoke():
                    see_tuple(block)
    except Exception as error:  # of code that nobody here has read; it is raised on with what to do about it
        raise refusal(model, f"its forward does not run on shapes alone, {cause(model, error)}") from error
    seen.counts.update(counts)
    return seen


def read(host: Standard, name: str, value: EProperty, seen: Seen) -> None:
    """Read one value inside the run; a read of what is never served ends with the run."""
    try:
        seen.shapes[host][name] = tuple(value.__get__(host).shape)
    except OutOfOrderError:
        return
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        seen.failures[host, name] = str(error)


def see_tuple(block: Layer) -> None:
    """Note inside the run whether a block returns a tuple, for a block that is skipped."""
    with suppress(OutOfOrderError):  # it never ran, which `require_stream` says
        block.returns_tuple = isinstance(block.output, (tuple, list))


def cause(model: Any, error: Exception) -> str:
    """The error of a scan in a line, and what to load the model with where that is known to help."""
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if getattr(text_config(model), "_experts_implementation", None) not in (None, "batched_mm"):
        said += '; load it with experts_implementation="batched_mm", for which shapes suffice'
    return said


# -- what is wrong ----------------------------------------------------------------------------------------------------


def require_stream(model: Any, seen: Seen) -> None:
    """Raise UnsupportedFamily where the blocks do not run once each, in order, on ``[batch, seq, hidden_size]``."""
    stream = (ROWS, TOKENS, model.hidden_size)
    places = {location: place for place, location in enumerate(seen.counts)}
    before = -1
    for index, block in enumerate(model.layers):
        location = f"{block.path}.output"
        runs = seen.counts.get(location, 0)
        if runs != 1 or places[location] < before:
            when = "does not run" if not runs else f"runs {runs} times" if runs > 1 else "runs before the one before it"
            raise refusal(model, f"block {index} {when} in a forward, and the values of a block are those of one run")
        before = places[location]
        for name in ("layer_input", "layer_output"):
            shape = seen.shapes[block].get(name)
            if shape != stream:
                raise refusal(
                    model,
                    f"its blocks do not pass on a stream [batch, seq, hidden_size]: {name} of block {index} is "
                    f"{shape or seen.failures.get((block, name))}, for {ROWS} rows of {TOKENS} tokens and hidden_size "
                    f"{model.hidden_size}",
                )


def refuse_values(model: Any, seen: Seen) -> None:
    """Mark on each envoy the values that are not what their names say (`Standard.refused`)."""
    for host, shapes in seen.shapes.items():
        for name, value in host.values().items():
            if value.layout is not None and value.reason(host) is None:
                reason = seen.failures.get((host, name)) or mismatch(host, value, shapes.get(name), seen.counts)
                if reason is not None:
                    host.refused[name] = reason
    if not isinstance(model.embed_tokens._module, nn.Embedding):
        kind = type(model.embed_tokens._module).__name__
        model.refused["token_embeddings"] = f"embed_tokens is {kind}, no embedding, and does more than look tokens up"
    places = {location: place for place, location in enumerate(seen.counts)}
    if "final_norm_output" in seen.shapes[model] and not places[f"{model.norm.path}.output"] > max(
        places[f"{block.path}.output"] for block in model.layers
    ):
        model.refused["final_norm_output"] = "the norm runs before the blocks do"


def mismatch(host: Standard, value: EProperty, shape: tuple[int, ...] | None, counts: dict[str, int]) -> str | None:
    """Why what was served is not ``value``, or None: never served, served several times, or of another shape."""
    attribute = None if value.key is None else value.attribute(value.path(host))
    if shape is None:
        return NOT_ON_INTERFACE if attribute in interface.INTERIOR else "its module is not called in a forward"
    if value.key is not None and several(value._location(host), counts):
        return "it is computed several times in one forward, and a name does not show which of them is meant"
    expected = tuple(size(host, axis) for axis in value.dims)
    if len(shape) != len(expected) or any(want not in (None, got) for want, got in zip(expected, shape, strict=True)):
        said = ", ".join(f"{axis} {want}" for axis, want in zip(value.dims, expected, strict=True))
        return f"what is served there has the shape {shape}, and this value is [{said}]"
    return None


def several(location: str, counts: dict[str, int]) -> bool:
    """Whether one forward served ``location`` more than once: a module's own as it is, one of a tap's by number."""
    return counts[location] > 1 or f"{location}_1" in counts


def size(host: Standard, axis: str) -> int | None:
    """The size that ``axis`` of a value on ``host`` should have, or None where nothing says."""
    if axis in OF_THE_RUN:
        return OF_THE_RUN[axis]
    try:
        return axis_size(host, axis)
    except (ValueError, AttributeError, RuntimeError):
        return None
