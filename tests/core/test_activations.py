"""nnterp.activations against transformers' own hidden states, each prompt run alone."""

from functools import partial

import pytest
import torch

from nnterp.activations import (
    collect_last_token_activations_session,
    collect_token_activations_batched,
    compute_next_token_probs,
    get_token_activations,
    layer_output,
)
from nnterp.interventions import logit_lens

BATCHED = [
    partial(collect_token_activations_batched, batch_size=2),
    partial(collect_last_token_activations_session, batch_size=2),
]
PROMPTS = ["The capital of France is", "king", "The Eiffel Tower is in the city of Paris", "hello hello", "Berlin is"]


def bare_streams(model, texts, position=-1):
    """The stream leaving every block at one position of each text, ``[layers, texts, hidden_size]``, by torch hooks."""
    columns = []

    def keep(module, args, output):
        columns[-1].append((output if isinstance(output, torch.Tensor) else output[0])[0, position])

    hooks = [block._module.register_forward_hook(keep) for block in model.layers]
    for text in texts:
        columns.append([])
        with torch.no_grad():
            model._module(**model.tokenizer(text, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.stack(column) for column in columns], dim=1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_last_token_of_every_prompt_and_layer(small_model):
    found = get_token_activations(small_model, PROMPTS)
    assert found.shape == (small_model.num_layers, len(PROMPTS), small_model.hidden_size)
    assert found.device.type == "cpu" and not found.requires_grad
    close(found, bare_streams(small_model, PROMPTS))


def test_layers_in_any_order_and_from_the_end(small_model):
    expected = bare_streams(small_model, PROMPTS)
    close(get_token_activations(small_model, PROMPTS, layers=[2, 0, -1, 2]), expected[[2, 0, -1, 2]])
    with pytest.raises(IndexError):
        get_token_activations(small_model, PROMPTS, layers=[4])


def test_the_trace_stops_after_the_last_layer_asked_for(small_model):
    ran = []
    hook = small_model.layers[-1]._module.register_forward_pre_hook(lambda *_: ran.append(True))
    get_token_activations(small_model, PROMPTS, layers=[1])
    assert not ran
    get_token_activations(small_model, PROMPTS, layers=[-1])
    hook.remove()
    assert ran


def test_any_value_can_be_collected(small_model):
    found = get_token_activations(
        small_model, PROMPTS[:1], layers=[1, 2], get_activations=lambda model, i: model.layers[i].mlp.mlp_output
    )
    for row, layer in enumerate((1, 2)):
        seen = []
        module = small_model.layers[layer].mlp._module
        hook = module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[0, -1]))
        small_model._module(**small_model.tokenizer(PROMPTS[0], return_tensors="pt"))
        hook.remove()
        close(found[row, 0], seen[0].detach())


def test_inside_an_open_trace_it_neither_saves_nor_stops(small_model):
    with torch.no_grad(), small_model.trace(PROMPTS) as tracer:
        found = get_token_activations(small_model, layers=[0, 1], tracer=tracer)
        kept = found.save()
        logits = small_model.logits.save()
    assert logits.shape[0] == len(PROMPTS)
    close(kept, bare_streams(small_model, PROMPTS)[:2])


def test_a_position_needs_padding_on_the_other_side(small_model, padding_right):
    longer = [text for text in PROMPTS if len(small_model.tokenizer(text).input_ids) > 1]
    close(get_token_activations(small_model, longer, idx=-2), bare_streams(small_model, longer, -2))
    close(get_token_activations(padding_right, longer, idx=1), bare_streams(small_model, longer, 1))
    with pytest.raises(ValueError, match="padded on the right.*padding_side"):
        get_token_activations(small_model, longer, idx=1)
    with pytest.raises(ValueError, match="padded on the left.*padding_side"):
        get_token_activations(padding_right, longer)
    with pytest.raises(ValueError, match="padded on the left"):
        collect_last_token_activations_session(padding_right, longer, batch_size=2)
    close(get_token_activations(padding_right, longer, idx=0), bare_streams(small_model, longer, 0))


def test_nothing_to_run(small_model):
    with pytest.raises(ValueError, match="give prompts, or tracer="):
        get_token_activations(small_model)
    for run in (get_token_activations, compute_next_token_probs, logit_lens, *BATCHED):
        with pytest.raises(ValueError, match="nothing to run: the list of prompts is empty"):
            run(small_model, [])
        with pytest.raises(ValueError, match="makes no token"):
            run(small_model, ["king", ""])
    with pytest.raises(ValueError, match="layers is empty"):
        get_token_activations(small_model, PROMPTS, layers=[])
    for collect in BATCHED:
        with pytest.raises(ValueError, match="one prompt or more, not 0"):
            collect(small_model, PROMPTS, batch_size=0)


def test_one_layer_is_a_list_of_one(small_model):
    close(get_token_activations(small_model, PROMPTS, layers=-1), bare_streams(small_model, PROMPTS)[-1:])
    with pytest.raises(IndexError, match="layer 9 is out of range: the model has 4 blocks"):
        get_token_activations(small_model, PROMPTS, layers=9)


@pytest.mark.parametrize("kind", [str, list, torch.Tensor])
def test_a_single_prompt_is_not_cut_into_batches(small_model, kind):
    ids = small_model.tokenizer(PROMPTS[2])["input_ids"]
    prompt = {str: PROMPTS[2], list: ids, torch.Tensor: torch.tensor(ids)}[kind]
    for collect in BATCHED:
        close(collect(small_model, prompt, batch_size=2), bare_streams(small_model, [PROMPTS[2]]))


def test_next_token_probs_need_left_padding(padding_right):
    with pytest.raises(ValueError, match="padded on the left"):
        compute_next_token_probs(padding_right, PROMPTS)
    found = compute_next_token_probs(padding_right, PROMPTS[0])
    logits = padding_right._module(**padding_right.tokenizer(PROMPTS[0], return_tensors="pt")).logits
    torch.testing.assert_close(found[0], logits[0, -1].softmax(-1).detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("collect", [collect_token_activations_batched, collect_last_token_activations_session])
def test_batches_give_what_the_prompts_give_together(small_model, collect):
    expected = bare_streams(small_model, PROMPTS)
    for batch_size in (1, 2, 10):
        close(collect(small_model, PROMPTS, batch_size), expected)
    chosen = collect(small_model, PROMPTS, 2, layers=[-1, 0], get_activations=layer_output, idx=-1)
    close(chosen, expected[[-1, 0]])


def test_batches_show_their_progress(small_model):
    seen = []
    collect_token_activations_batched(small_model, PROMPTS, 2, tqdm=lambda parts: seen.extend(parts) or parts)
    assert seen == [PROMPTS[:2], PROMPTS[2:4], PROMPTS[4:]]


def test_a_remote_run_sends_every_batch_in_one_session(small_model):
    expected = bare_streams(small_model, PROMPTS)
    close(collect_token_activations_batched(small_model, PROMPTS, 2, remote="local"), expected)
    close(collect_token_activations_batched(small_model, PROMPTS, 2, remote="local", use_session=False), expected)


def test_next_token_probs_are_the_bare_models(small_model):
    found = compute_next_token_probs(small_model, PROMPTS)
    assert found.shape == (len(PROMPTS), small_model.vocab_size) and not found.requires_grad
    for row, text in zip(found, PROMPTS, strict=True):
        logits = small_model._module(**small_model.tokenizer(text, return_tensors="pt")).logits
        torch.testing.assert_close(row, logits[0, -1].softmax(-1).detach(), rtol=1e-3, atol=1e-6)
