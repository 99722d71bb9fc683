"""Several models at once, several attention functions, and runs that end early: each trace as if it were alone."""

import threading

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama

from nnterp import Unavailable

IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])
PLAIN_LOOKUP = AttentionInterface.get_interface
PLAIN_FUNCTION = modeling_llama.eager_attention_forward


def test_models_traced_in_turns_and_inside_each_other(served):
    first, second = served.standardized(), served.standardized(served.llama(seed=1))
    expected_first, expected_second = served.values(first), served.values(second)
    assert not torch.equal(expected_first[0], expected_second[0])
    assert served.same(served.values(first), expected_first)
    with first.trace(IDS):
        outer = first.layers[1].self_attn.attention_queries.save()
        with second.trace(IDS):
            inner = second.layers[1].self_attn.attention_scores.save()
            inner_mid = second.layers[1].layer_mid.save()
        mid = first.layers[1].layer_mid.save()
    assert served.same([outer, mid], [expected_first[0], expected_first[5]])
    assert served.same([inner, inner_mid], [expected_second[2], expected_second[5]])
    assert served.same(served.values(second), expected_second)


def test_two_models_around_one_module(served):
    """A standardized and a plain one, whose drills put another forward in place; and two standardized ones."""
    module = served.llama()
    model, bare, other = served.standardized(module), served.plain(module), served.standardized(module)
    expected = served.values(model)
    with bare.trace(IDS):
        operation = bare.model.layers[1].source.self_mlp_0.output.save()
    assert served.same(served.values(model), expected)
    assert served.same(served.values(other), expected)
    with bare.trace(IDS):
        again = bare.model.layers[1].source.self_mlp_0.output.save()
    assert torch.equal(operation, again)
    assert served.same(served.values(model), expected)


def test_two_models_in_two_threads(served):
    models = [served.standardized(), served.standardized(served.gpt2())]
    expected = [served.values(model) for model in models]
    wrong = []

    def work(model, right):
        wrong.extend(step for step in range(20) if not served.same(served.values(model), right))

    threads = [threading.Thread(target=work, args=each) for each in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_attention_function_of_the_users(served):
    """Queries, keys, values and head outputs are served at its call; what is inside it is not."""

    def theirs(module, query, key, value, attention_mask, **kwargs):
        return PLAIN_FUNCTION(module, query, key, value, attention_mask, kwargs["scaling"])

    AttentionInterface.register("theirs", theirs)
    AttentionMaskInterface.register("theirs", AttentionMaskInterface()["eager"])
    try:
        module = served.llama()
        module.set_attn_implementation("theirs")
        model = served.standardized(module)
        attention = model.layers[1].self_attn
        with model.trace(IDS):
            queries = attention.attention_queries.save()
            outputs = attention.attention_head_outputs.save()
            attention.attention_head_outputs = torch.zeros(2, 5, 4, 8)
            contribution = attention.attention_output.save()
        expected = served.values(served.standardized())
        assert served.same([queries, outputs], [expected[0], expected[4]])
        assert not contribution.any()
        assert "theirs" in model.support()["self_attn.attention_scores"][1]
        with pytest.raises(Unavailable, match="theirs"), model.trace(IDS):
            attention.attention_scores.save()
    finally:
        AttentionInterface._global_mapping.pop("theirs")
        AttentionMaskInterface._global_mapping.pop("theirs")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_changing_the_implementation_between_traces(served, attention):
    """What can be read is asked of the config, when it is read."""
    model = served.standardized(served.llama(attention=attention))
    other = {"sdpa": "eager", "eager": "sdpa"}[attention]
    for implementation in (attention, other, attention):
        model._module.set_attn_implementation(implementation)
        if implementation == "eager":
            assert served.same(served.values(model), served.values(served.standardized()))
        else:
            with model.trace(IDS):
                queries = model.layers[1].self_attn.attention_queries.save()
            torch.testing.assert_close(queries, served.values(served.standardized())[0])
            assert model.support()["self_attn.attention_scores"] is not None


def fail_in_the_block(model):
    with model.trace(IDS):
        model.layers[1].self_attn.attention_queries.save()
        raise KeyError("mine")


def fail_before_the_model_runs(model):
    with model.trace(IDS):
        raise KeyError("mine")


def fail_in_the_model(model):
    with model.trace(torch.tensor([[10_000]])):
        model.layers[1].layer_mid.save()


def fail_out_of_order(model):
    with model.trace(IDS):
        model.layers[1].layer_mid.save()
        model.layers[1].self_attn.attention_queries.save()


def fail_in_a_wrong_assignment(model):
    with model.trace(IDS):
        model.layers[1].self_attn.attention_scores = torch.zeros(1)


def stop(model):
    with model.trace(IDS) as tracer:
        model.layers[1].self_attn.attention_queries.save()
        tracer.stop()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (fail_in_the_block, KeyError),
        (fail_before_the_model_runs, KeyError),
        (fail_in_the_model, IndexError),
        (fail_out_of_order, OutOfOrderError),
        (fail_in_a_wrong_assignment, ValueError),
        (stop, None),
    ],
    ids=lambda value: getattr(value, "__name__", "none"),
)
def test_a_run_that_ends_early_leaves_nothing_behind(served, end, error):
    """Nothing patched, and the next trace is right."""
    model = served.standardized()
    expected = served.values(model)
    if error is None:
        end(model)
    else:
        with pytest.raises(error):
            end(model)
    assert AttentionInterface.get_interface is PLAIN_LOOKUP
    assert served.same(served.values(model), expected)
