"""The locations of our own: counted per step, gone outside a run, and living beside everything nnsight and torch do.

The oracles are the bare module's hooks and a recording attention function; nothing here asks nnterp what is right.
"""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from nnsight import save
from nnsight.intervention.interleaver import OutOfOrderError
from nnsight.intervention.source import SourceNotAvailable
from nnsight.modeling.transformers import TransformersModel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
)
from transformers.models.llama import modeling_llama

from nnterp import StandardizedTransformer, Unavailable, loading

PLAIN_LOOKUP = AttentionInterface.get_interface
PLAIN_FUNCTION = modeling_llama.eager_attention_forward
IDS = torch.tensor([[5, 17, 42, 3, 9], [8, 1, 77, 20, 31]])
STEPS = 4


def llama(seed=0, attention="eager"):
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=97,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=97, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def standardized(module=None):
    return StandardizedTransformer(llama() if module is None else module)


class Plain(TransformersModel):
    """nnsight's own model of a module without a tokenizer."""

    def _loaded_preprocessors(self):
        return loading.loaded_preprocessors(self.task)

    def _wrap(self, module, *args, **kwargs):
        return loading.wrap_without_tokenizer(self, module)


def plain(module=None):
    return Plain(llama() if module is None else module, task="text-generation")


def values(model, layer=1, **inputs):
    """Every value inside one block, from one trace."""
    block = model.layers[layer]
    with model.trace(IDS, **inputs):
        queries = block.self_attn.attention_queries.save()
        keys = block.self_attn.attention_keys.save()
        scores = block.self_attn.attention_scores.save()
        probabilities = block.self_attn.attention_probabilities.save()
        outputs = block.self_attn.attention_head_outputs.save()
        mid = block.layer_mid.save()
    return [queries, keys, scores, probabilities, outputs, mid]


def drill(model):
    with model.trace(IDS):
        model.layers[1].source.self_mlp_0.output.save()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def without_cache(kwargs):
    """The keywords of a call without its key/value cache, whatever the release calls it."""
    return {name: value for name, value in kwargs.items() if not isinstance(value, DynamicCache)}


@pytest.fixture(autouse=True)
def nothing_is_patched():
    """Whatever a test does, transformers is its own afterwards."""
    yield
    assert AttentionInterface.get_interface is PLAIN_LOOKUP
    assert modeling_llama.eager_attention_forward is PLAIN_FUNCTION


# -- steps ------------------------------------------------------------------------------------------------------------


class Recorded:
    """What every step of a generation computes in block 1, by hooks and by an attention function that takes notes."""

    def __init__(self, monkeypatch):
        module = llama()
        self.steps = {"mid": [], "queries": [], "scores": [], "probabilities": [], "outputs": []}
        target = module.model.layers[1]
        target.post_attention_layernorm.register_forward_pre_hook(lambda _, args: self.steps["mid"].append(args[0]))

        def noting(attention, query, key, value, mask, scaling, **kwargs):
            output, weights = PLAIN_FUNCTION(attention, query, key, value, mask, scaling, **kwargs)
            if attention is target.self_attn:
                scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling
                for name, noted in (
                    ("queries", query),
                    ("scores", scores if mask is None else scores + mask),
                    ("probabilities", weights),
                    ("outputs", output),
                ):
                    self.steps[name].append(noted)
            return output, weights

        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(modeling_llama, "eager_attention_forward", noting)
            self.tokens = module.generate(IDS, max_new_tokens=STEPS, do_sample=False)

    def check(self, name, step, value):
        assert len(self.steps[name]) == STEPS
        torch.testing.assert_close(value, self.steps[name][step], rtol=0, atol=1e-6)


READS = {
    "mid": lambda block: block.layer_mid,
    "queries": lambda block: block.self_attn.attention_queries,
    "scores": lambda block: block.self_attn.attention_scores,
    "probabilities": lambda block: block.self_attn.attention_probabilities,
    "outputs": lambda block: block.self_attn.attention_head_outputs,
}


@pytest.mark.parametrize("name", READS)
def test_a_value_first_read_at_a_late_step_is_that_steps(name, monkeypatch):
    """After a read of something else at an earlier step, which is where locations counted from their first read err."""
    recorded, model = Recorded(monkeypatch), standardized()
    with torch.no_grad(), model.generate(IDS, max_new_tokens=STEPS, do_sample=False) as tracer:
        found = [].save()
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            found.append(READS[name](model.layers[1]))
    recorded.check(name, 2, found[0])


@pytest.mark.parametrize("name", READS)
def test_every_step_is_counted(name, monkeypatch):
    """All steps in order, and again in a later run of the same model, whose counts go on from the first."""
    recorded, model = Recorded(monkeypatch), standardized()
    for _ in range(2):
        with torch.no_grad(), model.generate(IDS, max_new_tokens=STEPS, do_sample=False) as tracer:
            found = [].save()
            for _ in tracer.iter[:STEPS]:
                found.append(READS[name](model.layers[1]))
        for step, value in enumerate(found):
            recorded.check(name, step, value)


def test_steps_are_counted_across_implementations(monkeypatch):
    """Runs in which there were no scores count as none of theirs, read or not."""
    recorded, model = Recorded(monkeypatch), standardized()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    for implementation in ("sdpa", "eager", "sdpa", "eager"):
        model._module.set_attn_implementation(implementation)
        with torch.no_grad(), model.generate(IDS, **options) as tracer:
            queries = [].save()
            for _ in tracer.iter[1:3]:
                queries.append(model.layers[1].self_attn.attention_queries)
        recorded.check("queries", 1, queries[0])
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        found = [].save()
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            found.append(model.layers[1].self_attn.attention_scores)
    recorded.check("scores", 2, found[0])


def test_a_late_edit_changes_that_step_alone():
    model = standardized()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        before = [].save()
        for _ in tracer.iter[:STEPS]:
            before.append(model.layers[1].self_attn.attention_probabilities.clone())
    with torch.no_grad(), model.generate(IDS, **options) as tracer:
        seen = [].save()
        for step in tracer.iter[:STEPS]:
            if step == 2:
                model.layers[1].self_attn.attention_probabilities[:] = 0
            seen.append(model.layers[1].self_attn.attention_head_outputs.abs().sum().item())
    assert [value == 0 for value in seen] == [False, False, True, False]
    assert [tuple(value.shape) for value in before] == [(2, 4, 5, 5), (2, 4, 1, 6), (2, 4, 1, 7), (2, 4, 1, 8)]


def test_two_calls_in_one_forward_are_two_locations():
    """The second is served apart, so the n-th visit of a location stays the n-th call of its module."""
    module = llama()
    attention = module.model.layers[1].self_attn
    original = type(attention).forward

    class Twice(type(attention)):
        def forward(self, *args, **kwargs):
            original(self, *args, **{**without_cache(kwargs), "attention_mask": None})
            return original(self, *args, **kwargs)

    attention.__class__ = Twice
    model = standardized(module)
    with torch.no_grad(), model.generate(IDS, max_new_tokens=3, do_sample=False) as tracer:
        shapes = [].save()
        for _ in tracer.iter[:3]:
            shapes.append(tuple(model.layers[1].self_attn.attention_queries.shape))
    assert shapes == [(2, 4, 5, 8), (2, 4, 1, 8), (2, 4, 1, 8)]


def test_operations_first_asked_for_at_a_late_step_are_refused():
    """nnsight counts them from then on, and would answer with a later step's."""
    model = standardized()
    with (
        pytest.raises(SourceNotAvailable, match="already been called"),
        model.generate(IDS, max_new_tokens=STEPS) as tracer,
    ):
        for _ in tracer.iter[1]:
            model.layers[0].layer_output.save()
        for _ in tracer.iter[2]:
            model.layers[0].source.self_mlp_0.output.save()


# -- outside a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_model_compiles_after_a_trace(build):
    """As one graph, with the same output: what a trace leaves behind in a forward can be traced through."""
    model = standardized(build())
    values(model)
    expected = model._module(IDS).logits
    torch.compiler.reset()
    compiled = torch.compile(model._module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS).logits, expected)
    torch.compiler.reset()


def test_the_model_is_untouched_by_its_traces():
    """Bit for bit, called directly after every kind of trace."""
    expected = llama()(IDS).logits
    model = standardized()
    values(model)
    drill(model)
    assert torch.equal(model._module(IDS).logits, expected)
    assert torch.equal(model.trace(IDS, trace=False).logits, expected)


def test_what_somebody_replaces_in_the_modeling_file_is_replaced_in_the_trace(monkeypatch):
    """The copies share the file's globals."""
    model = standardized()
    values(model)
    rotated = modeling_llama.repeat_kv
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda states, groups: rotated(0 * states, groups))
    assert not values(model)[4].any(), "the head outputs mix the values that the replaced function repeats"


@pytest.mark.parametrize("wrapped", ["standardized", "sourced"])
def test_copies_and_pickles_of_a_traced_module(wrapped):
    """They compute what the original does, and are traced like any other module."""
    model = standardized()
    expected, logits = values(model), model._module(IDS).logits
    if wrapped == "sourced":
        drill(model)
        values(model)
    for other in (copy.deepcopy(model._module), pickle.loads(pickle.dumps(model._module))):
        assert torch.equal(other(IDS).logits, logits)
        assert same(values(standardized(other)), expected)
        other.model.layers[1].mlp.down_proj.weight.data.zero_()
        assert torch.equal(model._module(IDS).logits, logits), "the copy runs on its own weights"


def left(build, use):
    """What of a model outlives its last name, with no garbage collection."""
    model = build()
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
    "use",
    [repr, values, StandardizedTransformer.support, drill, lambda model: (values(model), drill(model), values(model))],
    ids=["built", "read", "support", "drilled", "all"],
)
def test_a_model_is_freed_with_its_last_name(use):
    """By reference counting, as nnsight promises: a trace must not leave a cycle that waits for the collector."""
    assert left(plain, repr) == set(), "nnsight itself"
    assert left(standardized, use) == set()


# -- several models, several functions --------------------------------------------------------------------------------


def test_models_traced_in_turns_and_inside_each_other():
    first, second = standardized(), standardized(llama(seed=1))
    expected_first, expected_second = values(first), values(second)
    assert not torch.equal(expected_first[0], expected_second[0])
    assert same(values(first), expected_first)
    with first.trace(IDS):
        outer = first.layers[1].self_attn.attention_queries.save()
        with second.trace(IDS):
            inner = second.layers[1].self_attn.attention_scores.save()
            inner_mid = second.layers[1].layer_mid.save()
        mid = first.layers[1].layer_mid.save()
    assert same([outer, mid], [expected_first[0], expected_first[5]])
    assert same([inner, inner_mid], [expected_second[2], expected_second[5]])
    assert same(values(second), expected_second)


def test_two_models_around_one_module():
    """A standardized and a plain one, whose drills put another forward in place; and two standardized ones."""
    module = llama()
    model, bare, other = standardized(module), plain(module), standardized(module)
    expected = values(model)
    with bare.trace(IDS):
        operation = bare.model.layers[1].source.self_mlp_0.output.save()
    assert same(values(model), expected)
    assert same(values(other), expected)
    with bare.trace(IDS):
        again = bare.model.layers[1].source.self_mlp_0.output.save()
    assert torch.equal(operation, again)
    assert same(values(model), expected)


def test_two_models_in_two_threads():
    models = [standardized(), standardized(gpt2())]
    expected = [values(model) for model in models]
    wrong = []

    def work(model, right):
        wrong.extend(step for step in range(20) if not same(values(model), right))

    threads = [threading.Thread(target=work, args=each) for each in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_attention_function_of_the_users():
    """Queries, keys, values and head outputs are served at its call; what is inside it is not."""

    def theirs(module, query, key, value, attention_mask, **kwargs):
        return PLAIN_FUNCTION(module, query, key, value, attention_mask, kwargs["scaling"])

    AttentionInterface.register("theirs", theirs)
    AttentionMaskInterface.register("theirs", AttentionMaskInterface()["eager"])
    try:
        module = llama()
        module.set_attn_implementation("theirs")
        model = standardized(module)
        attention = model.layers[1].self_attn
        with model.trace(IDS):
            queries = attention.attention_queries.save()
            outputs = attention.attention_head_outputs.save()
            attention.attention_head_outputs = torch.zeros(2, 5, 4, 8)
            contribution = attention.attention_output.save()
        expected = values(standardized())
        assert same([queries, outputs], [expected[0], expected[4]])
        assert not contribution.any()
        assert "theirs" in model.support()["self_attn.attention_scores"][1]
        with pytest.raises(Unavailable, match="theirs"), model.trace(IDS):
            attention.attention_scores.save()
    finally:
        AttentionInterface._global_mapping.pop("theirs")
        AttentionMaskInterface._global_mapping.pop("theirs")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_changing_the_implementation_between_traces(attention):
    """What can be read is asked of the config, when it is read."""
    model = standardized(llama(attention=attention))
    other = {"sdpa": "eager", "eager": "sdpa"}[attention]
    for implementation in (attention, other, attention):
        model._module.set_attn_implementation(implementation)
        if implementation == "eager":
            assert same(values(model), values(standardized()))
        else:
            with model.trace(IDS):
                queries = model.layers[1].self_attn.attention_queries.save()
            torch.testing.assert_close(queries, values(standardized())[0])
            assert model.support()["self_attn.attention_scores"] is not None


# -- runs that end early ----------------------------------------------------------------------------------------------


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
def test_a_run_that_ends_early_leaves_nothing_behind(end, error):
    """Nothing patched, and the next trace is right."""
    model = standardized()
    expected = values(model)
    if error is None:
        end(model)
    else:
        with pytest.raises(error):
            end(model)
    assert AttentionInterface.get_interface is PLAIN_LOOKUP
    assert same(values(model), expected)


# -- beside nnsight's operations --------------------------------------------------------------------------------------


def test_operations_keep_their_labels():
    """Those of the forward with taps in it, and those of the attention function that serves."""
    model, bare = standardized(), plain()
    values(model)
    for name in ("self_attn", "mlp"):
        assert getattr(model.layers[1], name).source.names == getattr(bare.model.layers[1], name).source.names
    assert model.layers[1].source.names == bare.model.layers[1].source.names
    assert repr(model.layers[1].source) == repr(bare.model.layers[1].source)
    with model.trace(IDS):
        names = save(model.layers[1].self_attn.source.attention_interface_1.source.names)
    with bare.trace(IDS):
        expected = save(bare.model.layers[1].self_attn.source.attention_interface_1.source.names)
    assert names == expected


def test_operations_and_values_in_one_trace():
    """The drill of the block and of the attention call, in between the values, each what it is alone."""
    bare = plain()
    with bare.trace(IDS):
        operations = bare.model.layers[1].source
        inside = bare.model.layers[1].self_attn.source.attention_interface_1.source
        expected_softmax = inside.nn_functional_softmax_0.output.save()
        expected_mlp = operations.self_mlp_0.output.save()
    expected, model = values(standardized()), standardized()
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
        assert same([softmax, mlp], [expected_softmax, expected_mlp])
        assert same([queries, scores, probabilities, outputs, mid], [expected[0], *expected[2:]])
    assert same(values(model), expected)


def test_an_edit_reaches_what_an_operation_computes():
    model = standardized()
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


# -- other ways to run ------------------------------------------------------------------------------------------------


def test_a_trace_rooted_at_a_block():
    model, expected = standardized(), values(standardized())
    inner = model.model
    with model.trace(IDS, use_cache=False):
        entering = model.layers[1].inputs.save()
    args, kwargs = entering
    with model.layers[1].trace(*args, **kwargs):
        scores = model.layers[1].self_attn.attention_scores.save()
        mid = model.layers[1].layer_mid.save()
    assert same([scores, mid], [expected[2], expected[5]])
    with inner.trace(IDS):
        scores = inner.layers[1].self_attn.attention_scores.save()
        mid = inner.layers[1].layer_mid.save()
    assert same([scores, mid], [expected[2], expected[5]])


def test_stored_edits():
    model = standardized()
    expected = values(model)
    with model.edit() as (_, edited):
        edited.layers[1].self_attn.attention_scores[:] = 0
        edited.layers[1].layer_mid = torch.zeros(2, 5, 32)
    changed = values(edited)
    assert torch.equal(changed[3], torch.full((2, 4, 5, 5), 0.2))
    assert not changed[5].any()
    assert same(values(model), expected)
    with model.edit(inplace=True):
        model.layers[1].self_attn.attention_probabilities[:] = 0
    assert not values(model)[4].any()
    model.clear_edits()
    assert same(values(model), expected)


def test_a_model_pointed_at_another_module():
    model = standardized()
    values(model)
    model._update(llama(seed=7))
    assert same(values(model), values(standardized(llama(seed=7))))


def test_a_lazily_built_model(small_checkpoint):
    """What is there is known before the weights are, and a trace that loads them serves it."""
    options = {"attn_implementation": "eager", "device": "cpu"}
    loaded = StandardizedTransformer(str(small_checkpoint), dispatch=True, **options)
    model = StandardizedTransformer(str(small_checkpoint), **options)
    assert not model.dispatched
    assert model.support() == loaded.support()
    assert same(values(model), values(loaded))
    assert model.dispatched


def test_several_invokes():
    """Each sees and edits its own rows."""
    expected, model = values(standardized()), standardized()
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


def test_a_module_called_apart_serves_nothing():
    """A block run by hand inside a trace spends no visit of its locations."""
    expected, model = values(standardized()), standardized()
    with model.trace(IDS):
        args, kwargs = model.layers[1].inputs
        model.layers[1](*args, **without_cache(kwargs))
        scores = model.layers[1].self_attn.attention_scores.save()
        mid = model.layers[1].layer_mid.save()
    assert same([scores, mid], [expected[2], expected[5]])


def test_with_a_cache_the_keys_are_all_so_far():
    model = standardized()
    cache = DynamicCache(config=model._module.config)
    with torch.no_grad():
        model._module(IDS[:, :3], past_key_values=cache)
    whole = values(standardized())
    with torch.no_grad(), model.trace(IDS[:, 3:], past_key_values=cache):
        queries = model.layers[1].self_attn.attention_queries.save()
        keys = model.layers[1].self_attn.attention_keys.save()
    torch.testing.assert_close(keys, whole[1].detach())
    torch.testing.assert_close(queries, whole[0][:, :, 3:].detach())
