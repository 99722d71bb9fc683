"""What the demo's experiments run on: real sentences, and random tokens said twice."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nnterp.components import Unavailable
from nnterp.prompt_utils import Prompt

if TYPE_CHECKING:
    from nnterp.standardized import StandardizedTransformer

LENS = "The Eiffel Tower is in the city of"
MOOD = "When I woke up this morning, I felt"
SIMPLE = [LENS, "The capital of Germany is", "The opposite of hot is", MOOD]

FACT = "The capital of {} is the city of"
CAPITALS = {"Germany": "Berlin", "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Russia": "Moscow"}

BRIGHT = [
    "I am so happy and joyful",
    "What a wonderful, delightful day",
    "I love this, it is fantastic",
    "This makes me smile with joy",
]
DARK = [
    "I am so sad and miserable",
    "What a terrible, awful day",
    "I hate this, it is horrible",
    "This makes me cry with grief",
]
STEERED = ["I went for a walk and I saw", MOOD]
MOOD_WORDS = {
    "bright": ["happy", "great", "wonderful", "refreshed", "good"],
    "dark": ["sad", "sick", "terrible", "tired", "bad"],
}

COPY_LENGTH = 20
"""Tokens of one copy of the random text."""


def two_facts(model: StandardizedTransformer) -> tuple[str, str, int, Prompt]:
    """Two prompts that differ in one token, that token's position, and the second one with both answers to watch.

    The answers are the targets ``"source"`` and ``"target"``. Raises Unavailable where the tokenizer spells no two of
    the countries and their capitals in a way that lines up.
    """
    for (source, source_answer), (target, target_answer) in itertools.permutations(CAPITALS.items(), 2):
        texts = FACT.format(source), FACT.format(target)
        ids = [model.tokenizer(text)["input_ids"] for text in texts]
        differ = [i for i, (one, other) in enumerate(zip(*ids, strict=False)) if one != other]
        answers = Prompt.from_strings(texts[1], {"source": source_answer, "target": target_answer}, model)
        if len(ids[0]) == len(ids[1]) and len(differ) == 1 and answers.has_no_collisions():
            return *texts, differ[0], answers
    raise Unavailable("this tokenizer spells no two of the countries in one token each")


def random_tokens(model: StandardizedTransformer, rows: int, length: int) -> Tensor:
    """``[rows, length]`` ids of random words of the vocabulary, the same on every call.

    Words rather than any ids, so that the pattern can be read; whatever the vocabulary holds where it has too few.
    """
    wanted = rows * length
    order = torch.randperm(len(model.tokenizer), generator=torch.Generator().manual_seed(0)).tolist()
    words = (token for token in order if _is_word(model.tokenizer.decode([token])))
    chosen = list(itertools.islice(words, wanted))
    if len(chosen) < wanted:
        chosen = list(itertools.islice(itertools.cycle(order), wanted))
    return torch.tensor(chosen).view(rows, length)


def _is_word(text: str) -> bool:
    word = text.removeprefix(" ")
    return word != text and len(word) > 2 and word.isascii() and word.isalpha()
