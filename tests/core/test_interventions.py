"""nnterp.interventions against the same edits made with torch hooks on the bare module."""

from contextlib import contextmanager

import pytest
import torch

from nnterp import Unavailable
from nnterp.interventions import (
    TargetPrompt,
    TargetPromptBatch,
    it_repeat_prompt,
    logit_lens,
    patch_object_attn_lens,
    patchscope_generate,
    patchscope_lens,
    repeat_prompt,
)

PROMPTS = ["The capital of France is", "king", "hello hello"]
TARGET = TargetPrompt("king king hello hello the", -2)


def stream_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


def encode(model, text):
    return model.tokenizer(text, return_tensors="pt")


@torch.no_grad()
def bare_streams(model, text):
    """The stream leaving every block at ``text``'s last token: transformers' hidden states, the last one by a hook."""
    last = []
    with hooked(model.layers[-1]._module, lambda module, args, output: last.append(stream_of(output)[0, -1])):
        hidden = model._module(**encode(model, text), output_hidden_states=True).hidden_states
    return torch.stack([*(h[0, -1] for h in hidden[1:-1]), last[0]])


@torch.no_grad()
def bare_probs_with_stream(model, text, layer, position, vector):
    """The next-token probabilities of ``text`` with ``vector`` put into the stream leaving block ``layer``."""

    def put(module, args, output):
        stream_of(output)[0, position] = vector

    with hooked(model.layers[layer]._module, put):
        return model._module(**encode(model, text)).logits[0, -1].softmax(-1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_logit_lens_projects_every_blocks_output(small_model):
    found, against = logit_lens(small_model, PROMPTS, return_inv_logits=True)
    assert found.shape == (len(PROMPTS), small_model.num_layers, small_model.vocab_size)
    for row, text in enumerate(PROMPTS):
        with torch.no_grad():
            norm, head = small_model.norm._module, small_model.lm_head._module
            logits = head(norm(bare_streams(small_model, text)))
            own = small_model._module(**encode(small_model, text)).logits[0, -1]
        close(found[row], logits.softmax(-1))
        close(against[row], (-logits).softmax(-1))
        close(found[row, -1], own.softmax(-1))


def test_logit_lens_needs_left_padding(padding_right):
    with pytest.raises(ValueError, match="padded on the left"):
        logit_lens(padding_right, PROMPTS)


def test_repeat_prompts():
    assert repeat_prompt() == TargetPrompt("king king\n1135 1135\nhello hello\n?", -1)
    assert repeat_prompt(["a"], rel="=", sep=";", placeholder="x") == TargetPrompt("a=a;x", -1)
    instructed = it_repeat_prompt(["a"])
    assert instructed.prompt.endswith("a a\n?") and len(instructed.prompt) > len("a a\n?")
    assert instructed.index_to_patch == -1


def test_target_batches():
    two = TargetPromptBatch.from_target_prompts([TARGET, TargetPrompt("hello", -1)])
    assert two.prompts == [TARGET.prompt, "hello"] and two.index_to_patch.tolist() == [-2, -1]
    assert TargetPromptBatch.from_target_prompt(TARGET, 3).prompts == [TARGET.prompt] * 3
    assert TargetPromptBatch.from_prompts(["a", "b"], -1).index_to_patch.tolist() == [-1, -1]
    assert TargetPromptBatch.from_prompts("a", [3]).index_to_patch.tolist() == [3]
    assert TargetPromptBatch.auto(two, 2) is two
    assert TargetPromptBatch.auto([TARGET, TARGET], 2).prompts == TargetPromptBatch.auto(TARGET, 2).prompts
    with pytest.raises(ValueError, match="2 target prompts for 3"):
        TargetPromptBatch.auto(two, 3)
    with pytest.raises(ValueError, match="1 positions"):
        TargetPromptBatch.from_prompts(["a", "b"], [1])
    with pytest.raises(TypeError, match="TargetPrompt.*'hello'"):
        TargetPromptBatch.auto("hello", 1)


def test_no_target_prompts_are_not_the_default_one(small_llama):
    with pytest.raises(ValueError, match="0 target prompts for 1"):
        patchscope_lens(small_llama, "king", [])


def test_patchscope_lens_puts_each_source_into_the_target(small_model):
    found = patchscope_lens(small_model, PROMPTS, TARGET)
    assert found.shape == (len(PROMPTS), small_model.num_layers, small_model.vocab_size)
    for row, text in enumerate(PROMPTS):
        for layer, vector in enumerate(bare_streams(small_model, text)):
            expected = bare_probs_with_stream(small_model, TARGET.prompt, layer, TARGET.index_to_patch, vector)
            close(found[row, layer], expected)


def test_patchscope_lens_with_a_target_each_and_chosen_layers(small_model):
    targets = [TARGET, TargetPrompt("The Eiffel Tower is in", -3), TargetPrompt("king hello", -1)]
    found = patchscope_lens(small_model, PROMPTS, targets, layers=[-1, 1])
    for row, (text, target) in enumerate(zip(PROMPTS, targets, strict=True)):
        vector = bare_streams(small_model, text)[1]
        close(found[row, 1], bare_probs_with_stream(small_model, target.prompt, 1, target.index_to_patch, vector))
    counted_from_the_start = [TargetPrompt(target.prompt, 1) for target in targets]
    with pytest.raises(ValueError, match="from the end"):
        patchscope_lens(small_model, PROMPTS, counted_from_the_start)


def test_patchscope_lens_takes_hidden_states(small_model):
    latents = torch.randn(2, 3, small_model.hidden_size)
    found = patchscope_lens(small_model, latents=latents, target_patch_prompts=TARGET, layers=[0, 2])
    for row in range(3):
        for column, layer in enumerate((0, 2)):
            expected = bare_probs_with_stream(
                small_model, TARGET.prompt, layer, TARGET.index_to_patch, latents[column, row]
            )
            close(found[row, column], expected)
    for both_or_neither in ({}, {"source_prompts": PROMPTS, "latents": latents}):
        with pytest.raises(ValueError, match="exactly one"):
            patchscope_lens(small_model, **both_or_neither)
    with pytest.raises(ValueError, match="4 layers"):
        patchscope_lens(small_model, latents=latents)


@pytest.mark.parametrize("max_batch_size", [1, 4, 32])
def test_patchscope_generate_patches_the_prompt_once(small_model, max_batch_size):
    written = patchscope_generate(
        small_model, PROMPTS, TARGET, max_length=5, layers=[2, 0], max_batch_size=max_batch_size
    )
    assert list(written) == [2, 0]
    inputs = encode(small_model, TARGET.prompt)
    for layer, rows in written.items():
        for row, text in enumerate(PROMPTS):
            vector = bare_streams(small_model, text)[layer]

            def put(module, args, output, vector=vector):
                if stream_of(output).shape[1] > 1:
                    stream_of(output)[0, TARGET.index_to_patch] = vector

            with hooked(small_model.layers[layer]._module, put):
                expected = small_model._module.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert rows[row, : expected.shape[1]].tolist() == expected[0].tolist()


def test_patch_object_attn_lens_changes_what_the_attentions_read(small_model):
    source, target, position, span = "king hello", "The capital of France is", -2, 2
    found = patch_object_attn_lens(small_model, source, target, position, num_patches=span)
    assert found.shape == (1, small_model.num_layers, small_model.vocab_size)
    attentions = [block.self_attn._module for block in small_model.layers]

    def first_argument(args, kwargs):
        return args[0] if args else kwargs["hidden_states"]

    read = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(first_argument(args, kwargs)[0, -1]), with_kwargs=True
        )
        for module in attentions
    ]
    with torch.no_grad():
        small_model._module(**encode(small_model, source))
    for handle in handles:
        handle.remove()

    def put(vector):
        def hook(module, args, kwargs):
            hidden = first_argument(args, kwargs).clone()
            hidden[0, position] = vector
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return hook

    for layer in range(small_model.num_layers):
        window = range(layer, min(layer + span, small_model.num_layers))
        handles = [attentions[i].register_forward_pre_hook(put(read[i]), with_kwargs=True) for i in window]
        with torch.no_grad():
            expected = small_model._module(**encode(small_model, target)).logits[0, -1].softmax(-1)
        for handle in handles:
            handle.remove()
        close(found[0, layer], expected)


def test_patch_object_attn_lens_refuses_what_it_cannot_do(small_llama, monkeypatch):
    with pytest.raises(ValueError, match="1 source prompts for 3"):
        patch_object_attn_lens(small_llama, "king", PROMPTS, -1)
    monkeypatch.setattr(type(small_llama), "attention_layers", [0, 1, 3])
    with pytest.raises(Unavailable, match=r"blocks \[2\]"):
        patch_object_attn_lens(small_llama, "king", "hello", -1)
