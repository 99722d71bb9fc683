"""Beside nnsight's operations, rooted at a block, with stored edits, lazily loaded: the same values each way."""

import torch
from nnsight import save
from transformers import DynamicCache

from nnterp import StandardizedTransformer

IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])


def test_operations_keep_their_labels(served):
    """Those of the forward with taps in it, and those of the attention function that serves."""
    model, bare = served.standardized(), served.plain()
    served.values(model)
    for name in ("self_attn", "mlp"):
        assert getattr(model.layers[1], name).source.names == getattr(bare.model.layers[1], name).source.names
    assert model.layers[1].source.names == bare.model.layers[1].source.names
    assert repr(model.layers[1].source) == repr(bare.model.layers[1].source)
    with model.trace(IDS):
        names = save(model.layers[1].self_attn.source.attention_interface_1.source.names)
    with bare.trace(IDS):
        expected = save(bare.model.layers[1].self_attn.source.attention_interface_1.source.names)
    assert names == expected


def test_operations_and_values_in_one_trace(served):
    """The drill of the block and of the attention call, in between the values, each what it is alone."""
    bare = served.plain()
    with bare.trace(IDS):
        operations = bare.model.layers[1].source
        inside = bare.model.layers[1].self_attn.source.attention_interface_1.source
        expected_softmax = inside.nn_functional_softmax_0.output.save()
        expected_mlp = operations.self_mlp_0.output.save()
    expected, model = served.values(served.standardized()), served.standardized()
    block = model.layers[1]
    for _ in range(2):
        with model.trace(IDS):
            operations = block.source
            inside = block.self_attn.source.attention_interface_1.source
            queries = block.self_attn.attention_queries.save()
            scores = block.self_attn.attention_scores.save()
            softmax = inside.nn_functional_softmax_0.output.save()
            probabilities = block.self_attn.attention_probabilities.save()
            outputs = block.self_attn.attention_head_outputs.save()
            mid = block.layer_mid.save()
            mlp = operations.self_mlp_0.output.save()
        assert served.same([softmax, mlp], [expected_softmax, expected_mlp])
        assert served.same([queries, scores, probabilities, outputs, mid], [expected[0], *expected[2:]])
    assert served.same(served.values(model), expected)


def test_an_edit_reaches_what_an_operation_computes(served):
    model = served.standardized()
    block = model.layers[1]
    with model.trace(IDS):
        operations = block.source
        inside = block.self_attn.source.attention_interface_1.source
        block.self_attn.attention_scores = torch.zeros(2, 4, 5, 5)
        softmax = inside.nn_functional_softmax_0.output.save()
        inside.nn_functional_softmax_0.output = torch.ones(2, 4, 5, 5)
        probabilities = block.self_attn.attention_probabilities.save()
        block.layer_mid = torch.zeros(2, 5, 32)
        norm = operations.self_post_attention_layernorm_0.output.save()
    assert torch.equal(softmax, torch.full((2, 4, 5, 5), 0.2))
    assert torch.equal(probabilities, torch.ones(2, 4, 5, 5))
    assert not norm.any()


def test_a_trace_rooted_at_a_block(served):
    model, expected = served.standardized(), served.values(served.standardized())
    inner = model.model
    with model.trace(IDS, use_cache=False):
        entering = model.layers[1].inputs.save()
    args, kwargs = entering
    with model.layers[1].trace(*args, **kwargs):
        scores = model.layers[1].self_attn.attention_scores.save()
        mid = model.layers[1].layer_mid.save()
    assert served.same([scores, mid], [expected[2], expected[5]])
    with inner.trace(IDS):
        scores = inner.layers[1].self_attn.attention_scores.save()
        mid = inner.layers[1].layer_mid.save()
    assert served.same([scores, mid], [expected[2], expected[5]])


def test_stored_edits(served):
    model = served.standardized()
    expected = served.values(model)
    with model.edit() as (_, edited):
        edited.layers[1].self_attn.attention_scores[:] = 0
        edited.layers[1].layer_mid = torch.zeros(2, 5, 32)
    changed = served.values(edited)
    assert torch.equal(changed[3], torch.full((2, 4, 5, 5), 0.2))
    assert not changed[5].any()
    assert served.same(served.values(model), expected)
    with model.edit(inplace=True):
        model.layers[1].self_attn.attention_probabilities[:] = 0
    assert not served.values(model)[4].any()
    model.clear_edits()
    assert served.same(served.values(model), expected)


def test_a_model_pointed_at_another_module(served):
    model = served.standardized()
    served.values(model)
    model._update(served.llama(seed=7))
    assert served.same(served.values(model), served.values(served.standardized(served.llama(seed=7))))


def test_a_lazily_built_model(served, small_checkpoint):
    """What is there is known before the weights are, and a trace that loads them serves it."""
    options = {"attn_implementation": "eager", "device": "cpu"}
    loaded = StandardizedTransformer(str(small_checkpoint), dispatch=True, **options)
    model = StandardizedTransformer(str(small_checkpoint), **options)
    assert not model.dispatched
    assert model.support() == loaded.support()
    assert served.same(served.values(model), served.values(loaded))
    assert model.dispatched


def test_several_invokes(served):
    """Each sees and edits its own rows."""
    expected, model = served.values(served.standardized()), served.standardized()
    attention = model.layers[1].self_attn
    with model.trace() as tracer:
        with tracer.invoke(IDS[:1]):
            first = attention.attention_scores.save()
            attention.attention_probabilities[:] = 0
            zeroed = attention.attention_head_outputs.save()
        with tracer.invoke(IDS[1:]):
            second = attention.attention_scores.save()
            outputs = attention.attention_head_outputs.save()
    torch.testing.assert_close(torch.cat([first, second]), expected[2])
    assert not zeroed.any()
    torch.testing.assert_close(outputs, expected[4][1:])


def test_a_module_called_apart_serves_nothing(served):
    """A block run by hand inside a trace spends no visit of its locations."""
    expected, model = served.values(served.standardized()), served.standardized()
    with model.trace(IDS):
        args, kwargs = model.layers[1].inputs
        model.layers[1](*args, **served.without_cache(kwargs))
        scores = model.layers[1].self_attn.attention_scores.save()
        mid = model.layers[1].layer_mid.save()
    assert served.same([scores, mid], [expected[2], expected[5]])


def test_with_a_cache_the_keys_are_all_so_far(served):
    model = served.standardized()
    cache = DynamicCache(config=model._module.config)
    with torch.no_grad():
        model._module(IDS[:, :3], past_key_values=cache)
    whole = served.values(served.standardized())
    with torch.no_grad(), model.trace(IDS[:, 3:], past_key_values=cache):
        queries = model.layers[1].self_attn.attention_queries.save()
        keys = model.layers[1].self_attn.attention_keys.save()
    torch.testing.assert_close(keys, whole[1].detach())
    torch.testing.assert_close(queries, whole[0][:, :, 3:].detach())
