"""A short run that shows what a model's forward does, and leaves the model as it was.

`nnterp.order` measures where values fall, `nnterp.inspection` what the modules of an unknown family are called with.
Both run a few tokens, on shapes alone (nnsight's ``scan``) wherever the forward can: no weights are loaded for it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from nnsight.intervention.source import STATE
from torch import Tensor, nn

#: Rows and tokens of a probe: two numbers that no size of a model is likely to be taken for.
ROWS, TOKENS = 2, 5


def token_ids(model: Any) -> Tensor:
    """What a probe runs on: ``[ROWS, TOKENS]`` ids, 1 and up."""
    return torch.arange(1, ROWS * TOKENS + 1).reshape(ROWS, TOKENS) % model.vocab_size


def call(model: Any) -> tuple[Tensor, dict[str, Any]]:
    """Token ids, and what the model is called with beside them for every block to run.

    A family some of whose blocks run in some calls only says with what they do: ``def probe_inputs(model, rows)``.
    """
    ids, further = token_ids(model), getattr(model.family, "probe_inputs", None)
    return ids, {} if further is None else further(model, len(ids))


@contextmanager
def untouched(model: Any) -> Iterator[dict[str, int]]:
    """A run without the model's edits, its forwards put back as they are now.

    Yields nnsight's count of each location, which starts from nothing: its keys are the locations in the order of the
    forward, a number above one says that a module runs several times.
    """
    interleaver, edits = model.interleaver, model._edits
    interleaver.install()
    states = [envoy._module.__dict__[STATE] for envoy in model.modules()]
    forwards = [(state.body, state.sourced, state.compiled) for state in states]
    counts, interleaver.counts = interleaver.counts, {}
    model._edits = []
    try:
        with torch.no_grad():
            yield interleaver.counts
    finally:
        interleaver.counts, model._edits = counts, edits
        for state, forward in zip(states, forwards, strict=True):
            state.body, state.sourced, state.compiled = forward


@contextmanager
def shapes_only(model: Any) -> Iterator[None]:
    """Around a ``scan``: no module keeps a tensor without data from it, and a copied fake tensor does no harm.

    `copy.deepcopy` of a fake tensor copies a storage that is not there, which torch 2.13 answers with corrupted memory.
    Of an operation that shapes do not suffice for, torch logs an error beside raising one.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    kept = [(module, dict(module.__dict__), dict(module._buffers)) for module in model._module.modules()]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    FakeTensor.__deepcopy__ = lambda fake, memo: fake.clone()
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__
        logger.disabled = was_disabled
        for module, attributes, buffers in kept:
            restore(module, attributes, buffers)


def restore(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Put back what a module held before a scan, where it has come to hold something else than a number or a flag.

    These alone tell of what was done to the weights in place, which a scan does do to real ones: RWKV's first forward
    divides them and notes that it has.
    """
    pairs = ((module.__dict__, attributes), (module._buffers, buffers))
    new = [value for now, before in pairs for name, value in now.items() if value is not before.get(name, module)]
    if all(isinstance(value, (int, float, str)) for value in new):
        return
    for now, before in pairs:
        for name in now.keys() - before.keys():
            del now[name]
        now.update(before)
