"""A GPT-2 small enough to train while one waits: the demo's second family where no other trained checkpoint is at hand.

It learns two things. More than half of each batch is random words repeated, which only attention to the earlier copy
predicts, so an induction head forms; the first copy, which nothing predicts, is left out of the loss. The rest is
made-up sentences about capitals, landmarks, opposites and moods. It knows nothing else, but it knows that as a language
model does, in its weights.

The position embeddings are learned ones, as in every GPT-2, but start as sinusoids: a head that looks one token back is
then the same rotation at every position, and the induction head forms in hundreds of steps instead of thousands.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnterp.checkpoints import Report, cache_directory, written_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "England": "London",
    "Russia": "Moscow",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "China": "Beijing",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Cuba": "Havana",
}
LANDMARKS = {
    "The Eiffel Tower": "Paris",
    "The Colosseum": "Rome",
    "The Brandenburg Gate": "Berlin",
    "Big Ben": "London",
    "The Kremlin": "Moscow",
    "The Acropolis": "Athens",
}
OPPOSITES = [("hot", "cold"), ("big", "small"), ("old", "young"), ("happy", "sad"), ("good", "bad")]
BRIGHT = ["happy", "joyful", "wonderful", "delightful", "fantastic", "great", "good"]
DARK = ["sad", "miserable", "terrible", "awful", "horrible", "sick", "bad"]

STEPS, REPEATED_ROWS, TEXT_ROWS, CONTEXT, LEARNING_RATE = 800, 16, 12, 40, 5e-3
SHAPE = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.1}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def toy_gpt2(report: Report) -> Path:
    """The directory of the checkpoint, trained on first use and kept under `nnterp.checkpoints.cache_directory`."""
    directory = cache_directory() / "toy-gpt2"
    if not directory.is_dir():
        with written_whole(directory) as target:
            model, tokenizer = train(report)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    return directory


def train(report: Report, steps: int = STEPS) -> tuple[Any, PreTrainedTokenizerBase]:
    """Train the model from one fixed seed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    tokenizer = tokenizer_of([sentence(chance) for _ in range(3000)])
    vocabulary = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = torch.tensor([i for i, token in enumerate(vocabulary) if token.startswith("Ġ") and len(token) > 3])
    stream = text_stream(tokenizer, chance)
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=0, **SHAPE, **DROPOUT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data = sinusoids(config.n_positions, config.n_embd)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    report(f"training a GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e3:.0f} thousand parameters, once")
    for step in range(steps):
        repeated = [repeated_words(words, generator) for _ in range(REPEATED_ROWS)]
        written = [(row, row) for row in itertools.islice(stream, TEXT_ROWS)]
        ids, labels = (torch.stack(rows) for rows in zip(*repeated, *written, strict=True))
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 200 == 0:
            report(f"step {step + 1} of {steps}: {loss.item():.2f} nats a token")
    return model.eval(), tokenizer


def sentence(chance: random.Random) -> str:
    """One made-up sentence, or a few of one mood."""
    kind = chance.randrange(6)
    if kind < 2:
        country, capital = chance.choice(list(CAPITALS.items()))
        forms = ["The capital of {} is the city of {}.", "The capital of {} is {}."]
        return chance.choice(forms).format(country, capital)
    if kind == 2:
        return "{} is in the city of {}.".format(*chance.choice(list(LANDMARKS.items())))
    if kind == 3:
        pair = chance.choice(OPPOSITES)
        return "The opposite of {} is {}.".format(*chance.choice([pair, pair[::-1]]))
    bright = chance.random() < 0.5
    forms = [
        "I am so {} and {}.",
        "What a {}, {} day.",
        "I love this, it is {}." if bright else "I hate this, it is {}.",
        "This makes me smile with joy." if bright else "This makes me cry with grief.",
        "When I woke up this morning, I felt {}.",
        "I went for a walk and I saw a {} thing.",
    ]
    words = BRIGHT if bright else DARK
    chosen = chance.sample(forms, chance.randint(2, 4))
    return " ".join(form.format(*chance.sample(words, 2)) for form in chosen)


def text_stream(tokenizer: PreTrainedTokenizerBase, chance: random.Random) -> Iterator[Tensor]:
    """Rows of ids, sentences one after the other with the end token between them, each row beginning with one."""
    while True:
        row: list[int] = []
        while len(row) < CONTEXT:
            row += [*tokenizer(sentence(chance))["input_ids"], tokenizer.eos_token_id]
        yield torch.tensor(row[:CONTEXT])


def repeated_words(words: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One row of random words, repeated with a random period, and its labels: the row from the second copy on."""
    period = int(torch.randint(4, CONTEXT // 2 + 1, (), generator=generator))
    start = int(torch.randint(0, 4, (), generator=generator))
    once = words[torch.randint(len(words), (period,), generator=generator)]
    row = once.repeat(CONTEXT // period + 2)[start : start + CONTEXT]
    return row, torch.cat([torch.full((period,), -100), row[period:]])


def sinusoids(positions: int, width: int) -> Tensor:
    """Sines and cosines of the position at geometrically spaced frequencies, ``[positions, width]``."""
    frequencies = 100.0 ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(positions)[:, None] * frequencies
    return 0.2 * torch.cat([angles.sin(), angles.cos()], dim=1)


def tokenizer_of(sentences: list[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer, GPT-2's kind, in which every word of ``sentences`` is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, pad_token=end, unk_token=end, padding_side="left"
    )
