"""What nnsight offers on a TransformersModel works on a standardized one, under native names and standard ones."""

import warnings

import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError
from torch import nn

from nnterp import StandardizedTransformer

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module")
def directory(gpt2_checkpoint):
    return str(gpt2_checkpoint)


@pytest.fixture
def model(directory):
    return StandardizedTransformer(directory, dispatch=True, device="cpu")


@pytest.fixture
def clean(model):
    """Every block's output, the final stream and the logits of the bare module."""
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        return model._module(**inputs, output_hidden_states=True)


# -- module access ----------------------------------------------------------------------------------------------------


def test_the_tree_shows_native_names_and_standard_ones(model):
    shown = repr(model)
    for line in ("(transformer): GPT2Model(", "(wte): Embedding(400, 32)", "(input_layernorm/ln_1): LayerNorm("):
        assert line in shown
    assert "(lm_head): Linear(in_features=32, out_features=400, bias=False)" in shown
    assert "(layer_output) -> Residual [batch, seq, hidden_size]: The residual stream leaving the block" in shown
    assert model.transformer.h[-1] is model.layers[3] and model.transformer.h[0].mlp is model.layers[0].mlp


def test_a_rename_is_another_name_of_the_same_module(directory):
    renamed = StandardizedTransformer(directory, dispatch=True, rename={"transformer.h": "blocks", "mlp": "ffn"})
    assert renamed.blocks[0].ffn is renamed.transformer.h[0].mlp
    with renamed.trace("Hello"):
        a = renamed.blocks[0].ffn.output.save()
        b = renamed.transformer.h[0].mlp.output.save()
    assert torch.equal(a, b)


def test_a_module_called_inside_a_trace_keeps_its_place(model, clean):
    with torch.no_grad(), model.trace(PROMPT):
        early = model.layers[0].layer_output
        guess = model.lm_head(model.norm(early)).save()
        again = model.layers[2](early).save()
        lens = [].save()
        for layer in model.transformer.h[1:3]:
            lens.append(model.lm_head(model.transformer.ln_f(layer.output)))
        served = model.layers[3].mlp.output.save()
        logits = model.logits.save()
    bare = model._module
    with torch.no_grad():
        expected = [bare.lm_head(bare.transformer.ln_f(hidden)) for hidden in clean.hidden_states[1:4]]
        ahead = bare.transformer.h[2](clean.hidden_states[1])
    torch.testing.assert_close(guess, expected[0])
    torch.testing.assert_close(lens, expected[1:])
    torch.testing.assert_close(again, ahead)
    assert torch.equal(logits, clean.logits) and served.shape == (1, logits.shape[1], 32)


def test_module_calls_combine_with_torch(model, clean):
    with torch.no_grad(), model.trace(PROMPT):
        normed = model.norm(model.layers[-1].layer_output)
        similarity = torch.cosine_similarity(normed[:, -1:], normed[:, :-1], dim=-1).save()
    last = clean.hidden_states[-1]  # which transformers keeps after the final norm
    torch.testing.assert_close(similarity, torch.cosine_similarity(last[:, -1:], last[:, :-1], dim=-1))


def test_operations_inside_a_forward(model):
    attention = model.transformer.h[0].attn
    assert "attention_interface_1" in repr(attention.source)
    with torch.no_grad(), model.trace(PROMPT):
        called = attention.source.attention_interface_1.inputs.save()
        queries = model.layers[0].self_attn.attention_queries.save()
        heads = attention.source.attention_interface_1.output[0].save()
        also = model.layers[1].self_attn.attention_head_outputs.save()
    assert torch.equal(called[0][1], queries) and heads.shape == also.shape


def test_the_module_underneath(model):
    assert model.transformer.wte.weight is model._module.transformer.wte.weight
    assert isinstance(model.transformer.wte.weight, nn.Parameter)
    assert model.layers[0].mlp.c_fc.nf == 128
    assert model.device == torch.device("cpu") and model.devices == {torch.device("cpu")}
    assert model.layers[2].device == torch.device("cpu")


def test_a_path_is_resolved_at_run_time(model):
    assert model.get("transformer.h.0.mlp") is model.layers[0].mlp
    assert model.get("layers.0.self_attn.o_proj") is model.transformer.h[0].attn.c_proj
    with torch.no_grad(), model.trace(PROMPT):
        native = model.get("transformer.h.0.mlp.output").save()
        value = model.get("layers.1.layer_output").save()
    assert native.shape == value.shape == (1, native.shape[1], 32)


def test_the_tree_can_be_walked(model):
    paths = [path for path, _ in model.named_modules()]
    assert len(paths) == len(model.modules()) and "model.transformer.wte" in paths and len(set(paths)) == len(paths)
    mlps = model.named_modules(include_fn=lambda envoy: envoy.path.endswith(".mlp"))
    assert [envoy for _, envoy in mlps] == [block.mlp for block in model.layers]


def test_reads_follow_the_forward_and_saves_stay_inside(model):
    with pytest.raises(OutOfOrderError), model.trace("Hello"):
        model.layers[3].layer_output.save()
        model.layers[1].layer_output.save()
    with pytest.raises(ValueError, match="outside"):
        torch.zeros(3).save()


# -- running ----------------------------------------------------------------------------------------------------------


def test_several_invokes_are_one_batch(model, clean):
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(PROMPT):
            stream = model.layers[1].layer_output.save()
            logits = model.logits.save()
        with tracer.invoke(["king", "hello queen"]):
            model.layers[1].layer_output[:] = 0
            zeroed = model.layers[2].layer_input.save()
        with tracer.invoke():
            everything = model.logits.save()
    torch.testing.assert_close(stream, clean.hidden_states[2])
    torch.testing.assert_close(logits, clean.logits)
    assert zeroed.shape[0] == 2 and not zeroed.any() and everything.shape[0] == 3
    assert torch.equal(everything[:1], logits)


def test_a_barrier_lets_one_invoke_hand_over_to_another(model):
    with torch.no_grad(), model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke([3, 1, 4]):
            embeddings = model.token_embeddings
            barrier()
            first = model.logits.save()
        with tracer.invoke([1, 5, 9]):
            barrier()
            model.token_embeddings = embeddings
            second = model.logits.save()
    torch.testing.assert_close(first, second)


def test_generate_steps(model):
    with model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        shapes, tokens = [].save(), [].save()
        for _ in tracer.iter[:4]:
            shapes.append(tuple(model.layers[1].layer_output.shape))
            tokens.append(model.logits[0, -1].argmax())
        ids = tracer.result.save()
    length = shapes[0][1]
    assert shapes == [(1, length, 32)] + [(1, 1, 32)] * 3
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    assert torch.equal(ids, model._module.generate(**inputs, max_new_tokens=4, do_sample=False))
    assert ids[0, length:].tolist() == [int(token) for token in tokens]


def test_generate_with_an_edit_at_every_step(model):
    token = 7
    with model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[:3]:
            model.logits[:, :, token] = 1e4
        ids = tracer.result.save()
    assert ids[0, -3:].tolist() == [token] * 3
    assert torch.equal(model.generate(PROMPT, max_new_tokens=2, do_sample=False)[0, :-2], ids[0, :-3])


def test_the_pipeline(model):
    with model.pipe(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        stream = model.layers[0].layer_output.save()
        out = tracer.result.save()
    assert out[0]["generated_text"].startswith(PROMPT) and stream.shape[-1] == 32
    assert model.pipe(PROMPT, max_new_tokens=3, do_sample=False) == out


def test_a_session_hands_values_from_trace_to_trace(model):
    with torch.no_grad(), model.session():
        with model.trace("king queen"):
            hidden = model.layers[1].layer_output[:, -1:]
        with model.trace("hello hello"):
            model.layers[1].layer_output[:, -1:] = hidden
            patched = model.layers[2].layer_input.save()
        projected = model.project_on_vocab(hidden).save()
    with torch.no_grad(), model.trace("king queen"):
        expected = model.layers[1].layer_output[:, -1:].save()
    torch.testing.assert_close(patched[:, -1:], expected)
    torch.testing.assert_close(projected, model.project_on_vocab(expected))


def test_shapes_can_be_scanned_without_weights(directory):
    model = StandardizedTransformer(directory)
    with model.scan(PROMPT):
        queries = model.layers[1].self_attn.attention_queries.shape.save()
        stream = model.layers[1].layer_output.shape.save()
        logits = model.logits.shape.save()
    assert stream == (1, logits[1], 32) and queries == (1, 4, logits[1], 8) and logits[2] == 400
    assert not model.dispatched


def test_edits_are_stored_on_a_copy_or_in_place(model, clean):
    with model.edit() as (_, edited):
        edited.layers[1].layer_output = torch.zeros_like(edited.layers[1].layer_output)
    with torch.no_grad(), edited.trace(PROMPT):
        zeroed = edited.layers[2].layer_input.save()
    with torch.no_grad(), model.trace(PROMPT):
        logits = model.logits.save()
    assert not zeroed.any() and torch.equal(logits, clean.logits)

    with model.edit(inplace=True):
        model.skip_layers(1, 2)
    with torch.no_grad(), model.trace(PROMPT):
        skipped, entering = model.layers[2].layer_output.save(), model.layers[3].layer_input.save()
    assert torch.equal(skipped, clean.hidden_states[1]) and torch.equal(entering, skipped)
    model.clear_edits()
    with torch.no_grad(), model.trace(PROMPT):
        logits = model.logits.save()
    assert torch.equal(logits, clean.logits)


def test_the_cache_records_modules(model, clean):
    with torch.no_grad(), model.trace(PROMPT) as tracer:
        cache = tracer.cache(modules=[*model.layers, model.layers[0].self_attn])
        model.layers[0].layer_output *= 2
        logits = model.logits.save()
    torch.testing.assert_close(cache["model.transformer.h.0"].output, 2 * clean.hidden_states[1])
    assert cache.transformer.h[1].output.shape == clean.hidden_states[2].shape
    assert not torch.equal(logits, clean.logits)
    assert "model.transformer.h.0.attn" in cache


def test_gradients_of_values(model):
    with model.trace(PROMPT):
        stream = model.layers[1].layer_output
        queries = model.layers[2].self_attn.attention_queries
        loss = model.logits[0, -1, 7]
        with loss.backward():
            to_queries = queries.grad.save()
            to_stream = stream.grad.save()
    kept, hidden = [], None

    def keep(module, args, output):
        kept.append(output)
        output.retain_grad()

    hook = model._module.transformer.h[1].register_forward_hook(keep)
    hidden = model._module(**model.tokenizer(PROMPT, return_tensors="pt")).logits[0, -1, 7]
    hook.remove()
    hidden.backward()
    torch.testing.assert_close(to_stream, kept[0].grad)
    assert to_queries.shape == (1, 4, to_stream.shape[1], 8) and to_queries.any()
    model._module.zero_grad()


def test_a_trace_stops_where_it_is_told(model):
    ran = []
    hook = model._module.transformer.h[2].register_forward_hook(lambda *_: ran.append(True))
    with torch.no_grad(), model.trace(PROMPT) as tracer:
        stream = model.layers[1].layer_output.save()
        tracer.stop()
    hook.remove()
    assert stream.shape[-1] == 32 and not ran


def test_a_call_that_is_no_trace(model, clean):
    assert torch.equal(model.trace(PROMPT, trace=False).logits, clean.logits)
    with torch.no_grad(), model.trace(PROMPT) as tracer:
        result = tracer.result.save()
    assert torch.equal(result.logits, clean.logits)


def test_a_module_is_skipped(model, clean):
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[1].skip(model.layers[1].input)
        after = model.layers[1].layer_output.save()
    assert torch.equal(after, clean.hidden_states[1])


def test_nothing_warns(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = StandardizedTransformer(directory, dispatch=True)
        with torch.no_grad(), model.trace(PROMPT):
            model.logits.save()
        model.support(), model.order(), repr(model)
