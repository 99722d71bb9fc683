"""What a trace leaves behind: a module that compiles, copies, pickles, runs as before, and is freed."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers.models.llama import modeling_llama

from nnterp import StandardizedTransformer

IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])


@pytest.mark.parametrize("build", ["llama", "gpt2"])
def test_a_model_compiles_after_a_trace(served, build):
    """As one graph, with the same output: what a trace leaves behind in a forward can be traced through."""
    model = served.standardized(getattr(served, build)())
    served.values(model)
    expected = model._module(IDS).logits
    torch.compiler.reset()
    compiled = torch.compile(model._module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS).logits, expected)
    torch.compiler.reset()


def test_the_model_is_untouched_by_its_traces(served):
    """Bit for bit, called directly after every kind of trace."""
    expected = served.llama()(IDS).logits
    model = served.standardized()
    served.values(model)
    served.drill(model)
    assert torch.equal(model._module(IDS).logits, expected)
    assert torch.equal(model.trace(IDS, trace=False).logits, expected)


def test_what_somebody_replaces_in_the_modeling_file_is_replaced_in_the_trace(served, monkeypatch):
    """The copies share the file's globals."""
    model = served.standardized()
    served.values(model)
    rotated = modeling_llama.repeat_kv
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda states, groups: rotated(0 * states, groups))
    assert not served.values(model)[4].any(), "the head outputs mix the values that the replaced function repeats"


@pytest.mark.parametrize("wrapped", ["standardized", "sourced"])
def test_copies_and_pickles_of_a_traced_module(served, wrapped):
    """They compute what the original does, and are traced like any other module."""
    model = served.standardized()
    expected, logits = served.values(model), model._module(IDS).logits
    if wrapped == "sourced":
        served.drill(model)
        served.values(model)
    for other in (copy.deepcopy(model._module), pickle.loads(pickle.dumps(model._module))):
        assert torch.equal(other(IDS).logits, logits)
        assert served.same(served.values(served.standardized(other)), expected)
        other.model.layers[1].mlp.down_proj.weight.data.zero_()
        assert torch.equal(model._module(IDS).logits, logits), "the copy runs on its own weights"


def left(build, *uses):
    """What of a model outlives its last name, with no garbage collection."""
    model = build()
    for use in uses:
        use(model)
    kept = {
        "module": weakref.ref(model._module),
        "interleaver": weakref.ref(model.interleaver),
        "weight": weakref.ref(next(model._module.parameters())),
    }
    gc.collect()
    gc.disable()
    try:
        del model
        return {name for name, reference in kept.items() if reference() is not None}
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "uses", [[], ["values"], ["support"], ["drill"], ["values", "drill", "values", "show"]], ids=str
)
def test_a_model_is_freed_with_its_last_name(served, uses):
    """By reference counting, as nnsight promises: a trace must not leave a cycle that waits for the collector."""
    known = {"values": served.values, "drill": served.drill, "support": StandardizedTransformer.support, "show": repr}
    assert left(served.plain) == set(), "nnsight itself"
    assert left(served.standardized, *(known[use] for use in uses)) == set()
