"""What the bare transformers module computes, and what it computes when a value is edited: torch hooks, no nnterp.

A `Site` says where a value is in the bare model. `run` calls the model with hooks at the sites asked for, which
record each call and, where an edit is given, put its result in. The inside of attention has no module, so there the
file's ``eager_attention_forward`` is replaced for the run by the formula written out (`Formula`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Edit = Callable[[Tensor], Tensor]


@dataclass
class Call:
    """One call of a module: what a site's `read` and `write` may need besides the tensor itself."""

    module: nn.Module
    args: tuple
    kwargs: dict
    model: nn.Module


@dataclass(frozen=True)
class Site:
    """Where a value is in the bare model.

    Attributes:
        module: The standard path of a module: from the block (``"self_attn.o_proj"``, ``""`` the block itself), or
            from the root with a leading slash (``"/norm"``).
        side: ``"output"`` (the first element of a tuple) or ``"input"``.
        argument: Position or keyword of the input, or position in a tuple that is returned.
        read: ``read(call, tensor)``, the value from the tensor at the place (a reshape, a scale).
        write: ``write(call, tensor, value)``, the tensor to put there so that the value is ``value``.
    """

    module: str
    side: str = "output"
    argument: int | str = 0
    read: Callable[[Call, Tensor], Tensor] = field(default=lambda call, tensor: tensor)
    write: Callable[[Call, Tensor, Tensor], Tensor] = field(default=lambda call, tensor, value: value)


@dataclass(frozen=True)
class Inside:
    """A value inside the attention call, by its part in `Formula`."""

    part: str


@dataclass(frozen=True)
class Within:
    """A value inside the block's own forward, by its part in the block written out (`Block`)."""

    part: str


class Block:
    """A block's forward written out, for values that lie between its modules' calls; a family with such writes it.

    ``at(part, tensor)`` records (and edits) what lies there; ``block`` is the bare module, the rest its arguments.
    """

    def __call__(self, at: Callable, block: nn.Module, hidden: Tensor, **kwargs: Any) -> Any:
        raise NotImplementedError


def heads(site: Site) -> Site:
    """``site``, whose last axis is split into heads."""
    return Site(
        site.module,
        site.side,
        site.argument,
        lambda call, tensor: tensor.unflatten(-1, (call.model.config.get_text_config().num_attention_heads, -1)),
        lambda call, tensor, value: value.flatten(-2),
    )


class Formula:
    """Softmax attention written out, serving its six tensors; subclass it where a family's formula differs.

    ``at(part, tensor)`` records (and edits) one of ``queries``, ``keys``, ``values``, ``scores``, ``probabilities``,
    ``head_outputs``.

    Args:
        method: The method of the attention module that this stands for, returning the heads before the sequence, where
            the module looks no attention function up.
    """

    def __init__(self, method: str | None = None) -> None:
        self.method = method

    def __call__(self, at: Callable, module: nn.Module, query, key, value, mask, scaling=None, **options) -> tuple:
        query, key, value = at("queries", query), at("keys", key), at("values", value)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = at("scores", self.scores(module, query, self.repeated(query, key), mask, scaling, **options))
        probabilities = at("probabilities", self.pattern(module, scores).to(query.dtype))
        mixed = torch.matmul(probabilities, self.repeated(query, value)).transpose(1, 2).contiguous()
        return at("head_outputs", mixed), probabilities

    def scores(self, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, **options):
        """Scaled and masked, as they enter the softmax."""
        scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
        return scores if mask is None else scores + mask

    def pattern(self, module: nn.Module, scores: Tensor) -> Tensor:
        """The probabilities of ``scores``."""
        return torch.softmax(scores, dim=-1, dtype=torch.float32)

    @staticmethod
    def repeated(query: Tensor, grouped: Tensor) -> Tensor:
        return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], dim=1)


class WithSink(Formula):
    """A learned sink per head takes part of each row."""

    def pattern(self, module: nn.Module, scores: Tensor) -> Tensor:
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        with_sink = torch.cat([scores, sinks], dim=-1)
        with_sink = with_sink - with_sink.max(dim=-1, keepdim=True).values
        return torch.softmax(with_sink, dim=-1)[..., :-1]


class Forward(Formula):
    """The forward of an attention module written out, for one that computes its pattern itself.

    ``forward(at, module, ...)`` gets the module's own arguments and returns what the module does; calling the instance
    is the attention in it: ``heads, pattern = self(at, module, query, key, value, mask, scaling)``.
    """

    def forward(self, at: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class Run:
    """What one run of the bare model gave: ``output``, and per name the value at each call."""

    output: Any
    calls: dict[Any, list[Tensor]]

    def __getitem__(self, name: Any) -> Tensor:
        """The value of the only call."""
        (value,) = self.calls[name]
        return value


def greedy(steps: int) -> dict[str, Any]:
    """Arguments of a generation that makes exactly ``steps`` forward passes."""
    return {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}


class Recorder:
    def __init__(self, edits: Mapping[Any, Edit], at_call: int | None, graph: bool, in_place: bool) -> None:
        self.calls: dict[Any, list[Tensor]] = {}
        self.edits, self.at_call, self.graph, self.in_place = edits, at_call, graph, in_place

    def __call__(self, name: Any, value: Tensor) -> Tensor:
        """Record ``value`` and return it, edited where there is an edit of it (at this call)."""
        seen = self.calls.setdefault(name, [])
        edit = self.edits.get(name)
        if edit is not None and self.at_call in (None, len(seen)):
            value = edit(value if self.in_place else value.clone())
        if self.graph:
            value.retain_grad()
        seen.append(value if self.graph else value.detach().clone())
        return value


def run(
    model: nn.Module,
    call: Callable[[], Any],
    sites: Mapping[Any, tuple[nn.Module, Site | Inside | Within]],
    edits: Mapping[Any, Edit] | None = None,
    at_call: int | None = None,
    formula: Formula | None = None,
    block: Block | None = None,
    graph: bool = False,
    in_place: bool = False,
    first: bool = False,
) -> Run:
    """Run ``call`` with every one of ``sites`` recorded, and edited by ``edits`` (at the ``at_call``-th call only,
    if given).

    ``sites`` maps a name to the bare module and the site. With ``graph`` the recorded tensors are the ones the model
    used, and keep their gradients. With ``in_place`` an edit gets the model's own tensor. With ``first`` the hooks come
    before those by which transformers records hidden states that a model then uses.
    """
    record = Recorder(edits or {}, at_call, graph, in_place)
    with ExitStack() as stack:
        inside: dict[nn.Module, dict[str, Any]] = {}
        within: dict[nn.Module, dict[str, Any]] = {}
        for name, (module, site) in sites.items():
            if isinstance(site, Inside):
                inside.setdefault(module, {})[site.part] = name
            elif isinstance(site, Within):
                within.setdefault(module, {})[site.part] = name
            else:
                stack.enter_context(hooked(model, module, site, name, record, first))
        if inside:
            stack.enter_context(attention_replaced(model, inside, record, formula or Formula()))
        if within:
            stack.enter_context(forwards_replaced(within, record, block))
        output = call()
    return Run(output, record.calls)


@contextmanager
def hooked(
    model: nn.Module, module: nn.Module, site: Site, name: Any, record: Recorder, first: bool = False
) -> Iterator[None]:
    def value(args: tuple, kwargs: dict, tensor: Tensor) -> Tensor:
        call = Call(module, args, kwargs, model)
        old = site.read(call, tensor)
        new = record(name, old)
        return tensor if new is old and not record.graph else site.write(call, tensor, new)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        if isinstance(site.argument, int) and site.argument < len(args):
            replaced = list(args)
            replaced[site.argument] = value(args, kwargs, args[site.argument])
            return tuple(replaced), kwargs
        key = site.argument if isinstance(site.argument, str) else list(kwargs)[site.argument - len(args)]
        return args, {**kwargs, key: value(args, kwargs, kwargs[key])}

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if isinstance(output, tuple):
            changed = list(output)
            changed[site.argument] = value(args, kwargs, output[site.argument])
            return tuple(changed)
        if hasattr(output, "logits"):
            output.logits = value(args, kwargs, output.logits)
            return output
        return value(args, kwargs, output)

    if site.side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after, with_kwargs=True, prepend=first)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def attention_replaced(
    model: nn.Module, inside: Mapping[nn.Module, Mapping[str, Any]], record: Recorder, formula: Formula
) -> Iterator[None]:
    """For the modules of ``inside`` the attention call is ``formula``, for every other module it is what it was."""
    implementation = model.config._attn_implementation
    if isinstance(formula, Forward):
        with forwards_replaced(inside, record, formula.forward):
            yield
        return

    def serving(attend: Callable) -> Callable:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
        ):
            if module not in inside:
                return attend(module, query, key, value, mask, *args, **kwargs)
            at = recording(record, inside[module])
            if implementation == "eager":
                output, pattern = formula(at, module, query, key, value, mask, *args, **kwargs)
                return output.transpose(1, 2) if formula.method else output, pattern
            query, key, value = at("queries", query), at("keys", key), at("values", value)
            output, *rest = attend(module, query, key, value, mask, *args, **kwargs)
            return at("head_outputs", output), *rest

        return attention

    if implementation == "eager":
        name = formula.method or "eager_attention_forward"
        owners = {owner for module in inside for owner in owners_of(type(module), name)}
        saved = {owner: getattr(owner, name) for owner in owners}
        for owner, attend in saved.items():
            setattr(owner, name, serving(attend))
    else:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[implementation] = serving(ALL_ATTENTION_FUNCTIONS[implementation])
    try:
        yield
    finally:
        if implementation == "eager":
            for owner, attend in saved.items():
                setattr(owner, name, attend)
        else:
            del ALL_ATTENTION_FUNCTIONS[implementation]


@contextmanager
def forwards_replaced(
    parts: Mapping[nn.Module, Mapping[str, Any]], record: Recorder, forward: Callable
) -> Iterator[None]:
    """For the modules of ``parts`` the forward is ``forward(at, module, ...)``."""
    for module, names in parts.items():
        module.forward = partial(forward, recording(record, names), module)
    try:
        yield
    finally:
        for module in parts:
            del module.forward


def recording(record: Recorder, names: Mapping[str, Any]) -> Callable:
    """``at(part, tensor)``, which records the parts that have a name."""
    return lambda part, tensor: record(names[part], tensor) if part in names else tensor


def owners_of(kind: type, name: str) -> list[Any]:
    """Who holds the function ``name``: ``kind`` and what it is made from, or the files that define them."""
    found = [holder for klass in kind.__mro__ for holder in (klass, sys.modules.get(klass.__module__))]
    return [holder for holder in found if name in vars(holder)]
