"""Prompts with named answers: which token ids spell an answer, and how much probability a model gives them.

An answer is a word, a prediction is a token. ``get_first_tokens`` bridges the two: the ids of the first token of
``"Paris"`` and of ``" Paris"``. A ``Prompt`` holds a text and such ids under names of your choice, and ``run_prompts``
turns a list of them into one probability per prompt, name and layer::

    prompts = [
        Prompt.from_strings("The capital of France is", {"right": "Paris", "wrong": "Berlin"}, model),
        Prompt.from_strings("The capital of Germany is", {"right": "Berlin", "wrong": "Paris"}, model),
    ]
    run_prompts(model, prompts)["right"]                                 # [2, 1]: the model's own prediction
    run_prompts(model, prompts, get_probs_func=logit_lens)["right"]      # [2, num_layers]: one column per block
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nnterp.activations import batches, compute_next_token_probs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nnterp.standardized import StandardizedTransformer

RARE_PREFIX = "🍐"
"""A text that no vocabulary joins to a word behind it."""


class TokenizationError(Exception):
    """A word's own first token cannot be told apart from what the tokenizer puts before it."""


class ProbabilityFunction(Protocol):
    """What ``run_prompts`` calls: probabilities ``[batch, layers, vocab_size]`` for a list of texts."""

    def __call__(self, model: StandardizedTransformer, prompt: list[str], *, remote: bool, **kwargs: Any) -> Tensor: ...


def get_first_tokens(
    words: str | Sequence[str],
    model_or_tokenizer: StandardizedTransformer | PreTrainedTokenizerBase,
    use_hacky_implementation: bool = False,
) -> list[int]:
    """The ids that can begin ``words``: the first token of each word and of the word after a space, each id once.

    Where ``" word"`` begins with the bare space token, that id says nothing about the word and is left out. A model
    is asked through its ``add_prefix_false_tokenizer``. A tokenizer that puts a space before every text makes
    ``"word"`` and ``" word"`` one thing; such a tokenizer warns and is asked through ``use_hacky_implementation``: the
    word is tokenized behind a rare character, whose tokens are then taken off.

    Raises:
        TokenizationError: the tokens of the rare character are not the first ones of the text that begins with it.
    """
    tokenizer = getattr(model_or_tokenizer, "add_prefix_false_tokenizer", model_or_tokenizer)
    words = [words] if isinstance(words, str) else words
    if not use_hacky_implementation and _puts_a_space_first(tokenizer):
        warnings.warn(
            f"{type(tokenizer).__name__} puts a space before every text, so 'word' and ' word' read the same; the "
            f"first tokens are taken from the word behind a rare character instead (use_hacky_implementation=True)",
            stacklevel=2,
        )
        use_hacky_implementation = True
    tokenize = _tokenize_behind_rare_prefix if use_hacky_implementation else _tokenize
    lone_space = tokenize(tokenizer, " ")
    found: dict[int, None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenize(tokenizer, text)
            if ids and (text == word or ids[:1] != lone_space):
                found[ids[0]] = None
    return list(found)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _tokenize_behind_rare_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    prefix = _tokenize(tokenizer, RARE_PREFIX)
    ids = _tokenize(tokenizer, RARE_PREFIX + text)
    if not prefix or ids[: len(prefix)] != prefix:
        raise TokenizationError(
            f"{type(tokenizer).__name__} tokenizes {RARE_PREFIX + text!r} as {ids}, which does not begin with the "
            f"tokens {prefix} of {RARE_PREFIX!r}: the first token of {text!r} cannot be read off it. Pass the token "
            f"ids yourself: Prompt(prompt, target_tokens={{'name': [id, ...]}})"
        )
    return ids[len(prefix) :]


def _puts_a_space_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text "a" begins with another vocabulary entry than "a": SentencePiece's "▁a", or "▁" and then "a"."""
    first = tokenizer.convert_ids_to_tokens(_tokenize(tokenizer, "a"))[:1]
    return first not in (["a"], [b"a"])


@dataclass
class Prompt:
    """A text and the token ids of the answers to watch, by name.

    Attributes:
        prompt: what the model reads.
        target_tokens: for each name, the ids whose probability counts for it.
        target_strings: for each name, the words the ids came from, where they came from words.

    Raises:
        ValueError: a target has no ids (an empty word begins with no token), or one that is no id.
    """

    prompt: str
    target_tokens: dict[str, list[int]]
    target_strings: dict[str, str | list[str]] | None = None

    def __post_init__(self) -> None:
        for name, tokens in self.target_tokens.items():
            if not tokens or min(tokens) < 0:
                said = (self.target_strings or {}).get(name)
                words = "" if said is None else f", which is to begin {said!r}"
                raise ValueError(f"target {name!r} of {self.prompt!r}{words}, has no token ids to watch: {tokens}")

    @classmethod
    def from_strings(
        cls,
        prompt: str,
        target_strings: str | list[str] | Mapping[str, str | list[str]],
        model_or_tokenizer: StandardizedTransformer | PreTrainedTokenizerBase,
    ) -> Prompt:
        """A prompt whose answers are given as words; a word or a list of words is one target named ``"target"``."""
        if not isinstance(target_strings, Mapping):
            target_strings = {"target": target_strings}
        tokens = {name: get_first_tokens(words, model_or_tokenizer) for name, words in target_strings.items()}
        return cls(prompt, tokens, dict(target_strings))

    def has_no_collisions(self, ignore_targets: str | Iterable[str] | None = None) -> bool:
        """Whether no token id counts for two targets, the targets named in ``ignore_targets`` left aside."""
        ignored = {ignore_targets} if isinstance(ignore_targets, str) else set(ignore_targets or ())
        ids = [i for name, tokens in self.target_tokens.items() if name not in ignored for i in set(tokens)]
        return len(ids) == len(set(ids))

    def get_target_probs(self, probs: Tensor, layer: int | None = None) -> dict[str, Tensor]:
        """The probability of each target, summed over its ids (each once), on the CPU.

        ``probs`` is ``[batch, layers, vocab_size]``; a target's is ``[batch, layers]``, or ``[batch]`` at one
        ``layer``.
        """
        if layer is not None:
            probs = probs[:, layer]
        once = {name: list(dict.fromkeys(tokens)) for name, tokens in self.target_tokens.items()}
        return {name: probs[..., tokens].sum(-1).cpu() for name, tokens in once.items()}

    def run(
        self, model: StandardizedTransformer, get_probs: Callable[[StandardizedTransformer, str], Tensor]
    ) -> dict[str, Tensor]:
        """The target probabilities of this prompt under ``get_probs(model, prompt)``, ``[1, layers]`` each."""
        return self.get_target_probs(get_probs(model, self.prompt))


def next_token_probs_unsqueeze(
    model: StandardizedTransformer, prompt: str | list[str], remote: bool = False, **_: Any
) -> Tensor:
    """The model's own next-token probabilities as a single layer, ``[batch, 1, vocab_size]`` on the CPU."""
    return compute_next_token_probs(model, prompt, remote=remote).unsqueeze(1)


def run_prompts(
    model: StandardizedTransformer,
    prompts: Sequence[Prompt],
    batch_size: int = 32,
    get_probs_func: ProbabilityFunction | None = None,
    func_kwargs: dict[str, Any] | None = None,
    remote: bool = False,
    tqdm: Callable[[Iterable], Iterable] | None = None,
) -> dict[str, Tensor]:
    """The probability of each target on each prompt, ``{target: [num_prompts, layers]}`` on the CPU.

    ``get_probs_func(model, texts, remote=remote, **func_kwargs)`` gives the probabilities of one batch,
    ``[batch, layers, vocab_size]``: ``next_token_probs_unsqueeze`` by default, ``nnterp.interventions.logit_lens`` for
    every block's. ``tqdm`` wraps the loop over batches. Runs without gradients; no prompts give ``{}``.

    Raises:
        ValueError: the prompts do not all have the same target names.
    """
    if not prompts:
        return {}
    names = list(prompts[0].target_tokens)
    for prompt in prompts:
        if set(prompt.target_tokens) != set(names):
            raise ValueError(
                f"every prompt must have the same targets: {prompts[0].prompt!r} has {names}, "
                f"{prompt.prompt!r} has {list(prompt.target_tokens)}"
            )
    get_probs = get_probs_func or next_token_probs_unsqueeze
    parts = batches(prompts, batch_size)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in tqdm(parts) if tqdm else parts:
        with torch.no_grad():
            probs = get_probs(model, [prompt.prompt for prompt in batch], remote=remote, **(func_kwargs or {}))
        for row, prompt in enumerate(batch):
            for name, prob in prompt.get_target_probs(probs[row : row + 1]).items():
                rows[name].append(prob)
    return {name: torch.cat(found) for name, found in rows.items()}
