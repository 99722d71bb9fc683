"""nnterp.prompt_utils: first tokens, prompts with named answers, and their probabilities against the bare model."""

import pytest
import torch

from nnterp.interventions import logit_lens
from nnterp.prompt_utils import (
    Prompt,
    TokenizationError,
    get_first_tokens,
    next_token_probs_unsqueeze,
    run_prompts,
)

WORDS = ["Paris", "Berlin", "king"]


def bare_probs(model, texts):
    """Each text's next-token probabilities by the module itself, one text at a time."""
    rows = []
    for text in texts:
        ids = model.tokenizer(text, return_tensors="pt").input_ids
        rows.append(model._module(ids).logits[0, -1].softmax(-1))
    return torch.stack(rows)


def test_first_tokens_are_the_first_of_the_word_and_of_the_word_after_a_space(small_llama):
    tokenizer = small_llama.tokenizer
    for word in WORDS:
        expected = [tokenizer.encode(word)[0], tokenizer.encode(f" {word}")[0]]
        assert get_first_tokens(word, small_llama) == list(dict.fromkeys(expected))
    together = get_first_tokens([*WORDS, *WORDS], small_llama)
    assert len(together) == len(set(together))
    assert set(together) == {i for word in WORDS for i in get_first_tokens(word, small_llama)}
    assert get_first_tokens(WORDS, tokenizer) == together


def test_the_bare_space_token_says_nothing_about_a_word(small_llama):
    tokenizer = small_llama.tokenizer
    digit = " 7"
    assert tokenizer.encode(digit)[0] == tokenizer.encode(" ")[0], "the tokenizer joins a space to this digit"
    assert get_first_tokens("7", small_llama) == [tokenizer.encode("7")[0]]


def test_the_word_behind_a_rare_character_has_the_same_first_tokens(small_llama):
    assert get_first_tokens(WORDS, small_llama, use_hacky_implementation=True) == get_first_tokens(WORDS, small_llama)


@pytest.mark.parametrize("kind", ["metaspace", "byte-level"])
def test_a_tokenizer_that_puts_a_space_first_warns_and_still_tells_them_apart(kind, build_tokenizer):
    tokenizer = build_tokenizer(kind, add_prefix_space=True)
    space = {"metaspace": "▁", "byte-level": "Ġ"}[kind]
    with pytest.warns(UserWarning, match="puts a space before every text"):
        found = tokenizer.convert_ids_to_tokens(get_first_tokens("Paris", tokenizer))
    assert [token[0] for token in found] == ["P", space]


def test_a_tokenizer_whose_rare_character_cannot_be_taken_off_is_refused():
    def one_token_per_text(text, add_special_tokens):
        return {"input_ids": [len(text)]}

    with pytest.raises(TokenizationError, match="target_tokens"):
        get_first_tokens("Paris", one_token_per_text, use_hacky_implementation=True)


def test_a_prompt_from_strings_holds_its_targets(small_llama):
    prompt = Prompt.from_strings(
        "The capital of France is", {"right": "Paris", "wrong": ["Berlin", "king"]}, small_llama
    )
    assert prompt.target_tokens == {
        "right": get_first_tokens("Paris", small_llama),
        "wrong": get_first_tokens(["Berlin", "king"], small_llama),
    }
    assert prompt.target_strings == {"right": "Paris", "wrong": ["Berlin", "king"]}
    single = Prompt.from_strings("The capital of France is", ["Paris"], small_llama.tokenizer)
    assert list(single.target_tokens) == ["target"]


def test_collisions():
    prompt = Prompt("text", {"a": [1, 2, 2], "b": [3], "c": [2]})
    assert not prompt.has_no_collisions()
    assert prompt.has_no_collisions(ignore_targets="c")
    assert prompt.has_no_collisions(ignore_targets=["a", "b"])


def test_target_probs_sum_over_the_ids_of_a_target():
    probs = torch.rand(2, 3, 11).softmax(-1)
    prompt = Prompt("text", {"a": [1, 4], "b": [7]})
    every = prompt.get_target_probs(probs)
    assert every["a"].shape == (2, 3)
    assert torch.equal(every["a"], probs[:, :, 1] + probs[:, :, 4])
    assert torch.equal(every["b"], probs[:, :, 7])
    assert torch.equal(prompt.get_target_probs(probs, layer=-1)["a"], every["a"][:, -1])
    assert torch.equal(Prompt("text", {"a": [4, 1, 4]}).get_target_probs(probs)["a"], every["a"])


def test_a_target_without_ids_is_refused(small_llama):
    """It would have the probability zero, whatever the model says."""
    with pytest.raises(ValueError, match="target 'wrong' of 'text'.*no token ids"):
        Prompt("text", {"right": [1], "wrong": []})
    with pytest.raises(ValueError, match="target 'target' of 'text', which is to begin ''"):
        Prompt.from_strings("text", "", small_llama)
    with pytest.raises(ValueError, match="target 'a'"):
        Prompt("text", {"a": [-1]})


def test_run_gives_the_bare_models_probability(small_model):
    prompt = Prompt.from_strings("The capital of France is", {"right": "Paris"}, small_model)
    found = prompt.run(small_model, next_token_probs_unsqueeze)["right"]
    expected = bare_probs(small_model, [prompt.prompt])[:, prompt.target_tokens["right"]].sum(-1, keepdim=True)
    assert found.shape == (1, 1)
    torch.testing.assert_close(found, expected)


def test_prompts_run_in_batches_as_each_runs_alone(small_model):
    texts = ["The capital of France is", "king", "The Eiffel Tower is in the city of", "Berlin is"]
    prompts = [Prompt.from_strings(text, {"right": "Paris", "wrong": "Berlin"}, small_model) for text in texts]
    expected = bare_probs(small_model, texts)[:, prompts[0].target_tokens["right"]].sum(-1, keepdim=True)
    for batch_size in (1, 3, 32):
        found = run_prompts(small_model, prompts, batch_size=batch_size)
        assert list(found) == ["right", "wrong"]
        torch.testing.assert_close(found["right"], expected, rtol=1e-4, atol=1e-7)
    assert not found["right"].requires_grad


def test_run_prompts_takes_a_function_of_the_probabilities(small_model):
    prompts = [Prompt.from_strings(text, "Paris", small_model) for text in ("The capital of France is", "king")]
    seen = []

    def get_probs(model, texts, remote, **kwargs):
        seen.append((texts, remote, kwargs))
        return logit_lens(model, texts)

    wrapped = []
    found = run_prompts(
        small_model, prompts, 1, get_probs, {"note": 3}, tqdm=lambda starts: wrapped.append(True) or starts
    )
    assert found["target"].shape == (2, small_model.num_layers)
    assert seen == [(["The capital of France is"], False, {"note": 3}), (["king"], False, {"note": 3})]
    assert wrapped == [True]
    own = run_prompts(small_model, prompts)["target"]
    torch.testing.assert_close(found["target"][:, -1:], own, rtol=1e-4, atol=1e-7)


def test_prompts_with_other_targets_are_refused_and_none_give_nothing(small_llama):
    with pytest.raises(ValueError, match="same targets.*'b'"):
        run_prompts(small_llama, [Prompt("one", {"a": [1]}), Prompt("two", {"b": [1]})])
    assert run_prompts(small_llama, []) == {}
