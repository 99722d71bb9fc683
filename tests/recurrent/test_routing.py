"""Which kernels a family's mixers run through: chosen and put back, in time for the next run, and no other family's."""

from types import SimpleNamespace

import pytest
import torch

import nnterp
from nnterp import Unavailable, chunk_per_token, families, route_delta_rule, route_kernels

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

KERNELS = {
    "mamba": ("mamba_selective_scan", "mamba_selective_state_update"),
    "mamba2": ("mamba2_chunk_scan", "mamba2_selective_state_update"),
    "qwen3_next": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
}


def modeling(model_type):
    return families.lookup(model_type).modeling


def bound(model_type):
    return [getattr(modeling(model_type), name) for name in KERNELS[model_type]]


def unwrapped(function):
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def read(model, *names):
    """Values of the first mixer, then the logits."""
    mixer = model.layers[0].linear_attn
    with torch.no_grad(), model.trace(IDS):
        found = [getattr(mixer, name).clone() for name in names].save()
        logits = model.logits.save()
    return [*found, logits]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", KERNELS)
def test_round_trip(build, model_type):
    """Each name is transformers' own function, a DeltaNet's both the loop; twice is once; and back."""
    family, before = build(model_type).family, bound(model_type)
    for _ in range(2):
        route_kernels(family)
        prompt, step = bound(model_type)
        assert step is unwrapped(before[1])
        assert prompt is (step if model_type == "qwen3_next" else unwrapped(before[0]))
    for _ in range(2):
        route_kernels(family, "default")
        assert bound(model_type) == before


def test_default_before_anything_was_routed(build):
    before = bound("mamba2")
    route_kernels(build("mamba2").family, "default")
    assert bound("mamba2") == before


@pytest.mark.parametrize("model_type", KERNELS)
def test_family_modeling_module_or_namespace(build, model_type):
    family, before = build(model_type).family, bound(model_type)
    for given in (modeling(model_type), SimpleNamespace(ENVOYS=family.ENVOYS), family):
        route_kernels(given, "torch")
        assert bound(model_type)[1] is unwrapped(before[1]) is not before[1]
        route_kernels(given, "default")
        assert bound(model_type) == before


def test_delta_rule_in_its_own_words(build):
    model, (prompt, step) = build("qwen3_next"), bound("qwen3_next")
    route_delta_rule(model.family)
    assert bound("qwen3_next") == [unwrapped(step)] * 2
    route_delta_rule(model.family, "chunked")
    assert bound("qwen3_next") == [prompt, step]
    route_delta_rule(modeling("qwen3_next"), "recurrent")
    assert bound("qwen3_next") == [unwrapped(step)] * 2


def test_wrong_words(build):
    model = build("qwen3_next")
    before = bound("qwen3_next")
    for word in ("recurrent", "fast", "", None):
        with pytest.raises(ValueError, match="torch"):
            route_kernels(model.family, word)
    for word in ("torch", "default", None):
        with pytest.raises(ValueError, match="recurrent"):
            route_delta_rule(model.family, word)
    for family in (families.lookup("llama"), SimpleNamespace(ENVOYS={}), modeling_of_llama()):
        with pytest.raises(ValueError, match="no recurrent mixer"):
            route_kernels(family)
    assert bound("qwen3_next") == before


def modeling_of_llama():
    from transformers.models.llama import modeling_llama

    return modeling_llama


def test_other_families_stay(build):
    before = bound("mamba"), bound("mamba2")
    route_kernels(build("qwen3_next").family)
    assert (bound("mamba"), bound("mamba2")) == before


# -- what a run sees --------------------------------------------------------------------------------------------------


def test_after_a_first_trace(build):
    """From the next run on and until it is undone; `order` and `support` follow; on every model of the family."""
    model, other = build("qwen3_next"), build("qwen3_next")
    mixer = model.layers[0].linear_attn
    outputs, logits = read(model, "attention_head_outputs")
    assert "linear_attn.states" not in model.order(0)
    with pytest.raises(Unavailable, match="route_kernels"), model.trace(IDS):
        mixer.states.save()
    route_kernels(model.family)
    assert mixer.support()["states"] is mixer.support()["state"] is None
    order = model.order(0)
    assert order["linear_attn.decays"] < order["linear_attn.states"] < order["linear_attn.attention_head_outputs"]
    assert order["linear_attn.attention_head_outputs"] < order["linear_attn.state_output"]
    states, routed, final, same = read(model, "states", "attention_head_outputs", "state_output")
    assert torch.equal(states[:, -1], final)
    close(routed, outputs)
    close(same, logits)
    assert read(other, "states")[0].shape == states.shape
    route_kernels(model.family, "default")
    assert "linear_attn.states" not in model.order(0)
    assert torch.equal(read(model)[0], logits)
    with pytest.raises(Unavailable, match="route_kernels"), model.trace(IDS):
        mixer.state.save()


@pytest.mark.parametrize("model_type", KERNELS)
def test_routed_generation(build, model_type):
    model = build(model_type)

    def generated():
        with model.generate(IDS, max_new_tokens=4, do_sample=False) as tracer:
            final = [].save()
            for _ in tracer.iter[0:4]:
                final.append(model.layers[0].linear_attn.state_output.clone())
            text = tracer.result.save()
        return text, final

    text, final = generated()
    route_kernels(model.family)
    routed_text, routed = generated()
    assert torch.equal(text, routed_text)
    for got, expected in zip(routed, final, strict=True):
        close(got, expected)


def test_routing_inside_a_session(build):
    """Takes effect at the next run, not at the session's end."""
    model = build("qwen3_next")
    mixer = model.layers[0].linear_attn
    with torch.no_grad(), model.session():
        with model.trace(IDS):
            outputs = mixer.attention_head_outputs.clone().save()
        route_kernels(model.family)
        with model.trace(IDS):
            states = mixer.states.clone().save()
            routed = mixer.attention_head_outputs.clone().save()
    assert states.shape[1] == IDS.shape[1]
    close(routed, outputs)


# -- compiled kernels -------------------------------------------------------------------------------------------------


def compiled_for(kernel, monkeypatch):
    """Have transformers dispatch ``kernel`` to another package's function, which computes the same."""
    while "implementation" not in kernel.__code__.co_freevars:
        kernel = kernel.__wrapped__
    cells = dict(zip(kernel.__code__.co_freevars, kernel.__closure__, strict=True))
    plain = cells["torch_function"].cell_contents

    def compiled(*args, **kwargs):
        return plain(*args, **kwargs)

    compiled.__module__ = "kernel_package.ops"
    monkeypatch.setattr(cells["implementation"], "cell_contents", compiled)


@pytest.mark.parametrize("model_type", KERNELS)
def test_compiled_kernel_hides_what_is_inside_it(build, model_type, monkeypatch):
    """The states, by the package's name; inputs and outputs are read and edited; routed, nothing is hidden."""
    model = build(model_type)
    mixer = model.layers[0].linear_attn
    queries, outputs, final, logits = read(model, "attention_queries", "attention_head_outputs", "state_output")
    for kernel in bound(model_type):
        compiled_for(kernel, monkeypatch)
    if model_type == "mamba2":
        chunk_per_token(model)
    for name in ("states", "state"):
        reason = mixer.support()[name]
        assert "kernel_package" in reason or (model_type, name) == ("mamba2", "state") or model_type == "qwen3_next"
    with pytest.raises(Unavailable), model.trace(IDS):
        mixer.states.save()
    hidden = read(model, "attention_queries", "attention_head_outputs", "state_output")
    for got, expected in zip(hidden, (queries, outputs, final, logits), strict=True):
        close(got, expected)
    with torch.no_grad(), model.trace(IDS):
        mixer.attention_values = mixer.attention_values * 0
        silent = mixer.attention_head_outputs.clone().save()
    assert not silent.any()
    route_kernels(model.family)
    assert mixer.support()["states"] is None
    states, last = read(model, "states", "state_output")[:2]
    assert torch.equal(states[:, -1], last)
    close(last, final)


# -- chunks of one token ----------------------------------------------------------------------------------------------


def test_chunk_per_token(build):
    """On one model, from the next run on; twice is once; the outputs stay; then the sizes it was built with."""
    model, other = build("mamba2"), build("mamba2")
    mixer = model.layers[0].linear_attn
    outputs, logits = read(model, "attention_head_outputs")
    assert "chunk_size is 4" in mixer.support()["states"] and "chunk_per_token" in mixer.support()["states"]
    assert "linear_attn.states" not in model.order(0)
    for _ in range(2):
        chunk_per_token(model)
        assert [block.linear_attn._module.chunk_size for block in model.layers] == [1, 1]
    assert [block.linear_attn._module.chunk_size for block in other.layers] == [4, 4]
    assert other.layers[0].linear_attn.support()["states"] is not None
    assert "linear_attn.states" in model.order(0)
    states, chunked, final, same = read(model, "states", "attention_head_outputs", "state_output")
    assert torch.equal(states[:, -1], final)
    close(chunked, outputs)
    close(same, logits)
    route_kernels(model.family, "default")
    assert mixer.support()["states"] is None, "not undone by the kernels' default"
    for _ in range(2):
        chunk_per_token(model, enabled=False)
        assert [block.linear_attn._module.chunk_size for block in model.layers] == [4, 4]
    assert torch.equal(read(model)[0], logits)
    with pytest.raises(Unavailable, match="chunk_per_token"), model.trace(IDS):
        mixer.states.save()


def test_chunk_per_token_undone_first(build):
    model = build("mamba2")
    chunk_per_token(model, enabled=False)
    assert [block.linear_attn._module.chunk_size for block in model.layers] == [4, 4]


def test_chunk_per_token_of_a_model_that_is_not_loaded(saved):
    model = nnterp.StandardizedTransformer(str(saved("mamba2")))
    chunk_per_token(model)
    assert read(model, "states")[0].shape[1] == IDS.shape[1]


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "llama"])
def test_chunk_per_token_without_such_a_mixer(build, model_type):
    model = build(model_type)
    with torch.no_grad(), model.trace(IDS):
        before = model.logits.save()
    for enabled in (True, False):
        with pytest.raises(ValueError, match="no Mamba-2 mixer"):
            chunk_per_token(model, enabled)
    with torch.no_grad(), model.trace(IDS):
        after = model.logits.save()
    assert torch.equal(before, after)
