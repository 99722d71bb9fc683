"""Tiny checkpoints: random weights in which every parameter matters, a small real tokenizer, saved like any other.

A config's own initialization makes a tiny model a bad witness: norms are the identity, biases are zero, and weights
so small that a wrong value changes nothing one can see. Here every parameter is drawn so that it moves the logits.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnterp.testing import oracles

#: Entries of the tiny tokenizer, and ``vocab_size`` of a tiny config that does not say.
VOCAB = 300
END, PAD = "<|end|>", "<|pad|>"

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A quick answer is the right answer.",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "Once upon a time there was a model that read its own mind.",
)


def tokenizer(special: tuple[str, ...] = ()) -> Any:
    """A byte-level BPE tokenizer of `VOCAB` entries with an end and a padding token; it pads on the left.

    ``special`` are further tokens that are never split, with ids from 2 on.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END, PAD, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD, padding_side="left")


def config(**fields: Any) -> Any:
    """The config of ``model_type`` with ``fields``; the kit's vocabulary and special tokens where they do not say.

    Those are the text model's: on a wrapper they go into its ``text_config``.
    """
    from transformers import AutoConfig

    special = {"vocab_size": VOCAB, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    if "text_config" in fields:
        fields = {**fields, "text_config": {**special, **fields["text_config"]}}
    else:
        fields = {**special, **fields}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def randomized(model: Any, seed: int = 0) -> Any:
    """``model`` with every parameter drawn anew: matrices from N(0, 0.2²), vectors (norms, biases) moved by as much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def auto_class(config: Any) -> Any:
    """What builds the bare model of ``config``: the causal language model, or the wrapper that has one inside."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def save(config: Any, directory: Path, prepare: Callable[[Any], None] | None = None) -> Path:
    """Build the model of ``config`` with random weights; save it and a tokenizer in ``directory``.

    ``prepare`` is called with the model before it is saved.
    """
    with torch.random.fork_rng(devices=[]):  # what `randomized` leaves as transformers initialized it is fixed too
        torch.manual_seed(0)
        model = randomized(auto_class(config).from_config(config))
    if prepare is not None:
        prepare(model)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


class Checkpoint:
    """One layout's tiny checkpoint on disk and the copies of it that tests share."""

    def __init__(self, suite: Any, layout: str, directory: Any) -> None:
        self.facts = suite.LAYOUTS[layout]
        self.config = config(**{**suite.CONFIG, **self.facts.get("config", {})})
        self.options = {"attn_implementation": "eager", **self.facts.get("load", {})}
        self.directory = save(self.config, directory, suite.prepare)
        generator = torch.Generator().manual_seed(1)
        self.everything: dict | None = None
        self.recorded: dict[tuple[bool, int], oracles.Run] = {}
        self.ids = torch.randint(2, self.config.get_text_config().vocab_size, (2, 6), generator=generator)

    def load(self, dispatch: bool = True, **options: Any) -> Any:
        from nnterp import StandardizedTransformer

        return StandardizedTransformer(str(self.directory), dispatch=dispatch, **{**self.options, **options})

    def load_bare(self, **options: Any) -> Any:
        return auto_class(self.config).from_pretrained(self.directory, **{**self.options, **options}).eval()

    def without_path(self) -> Any:
        """The bare model built in memory, from which no tokenizer can be found."""
        built = auto_class(self.config).from_config(self.config, **self.options).eval()
        built.load_state_dict(self.bare.state_dict())
        return built

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def bare(self) -> Any:
        return self.load_bare()

    @cached_property
    def clean_logits(self) -> Tensor:
        """What the bare model returns for `ids`."""
        return self.bare(input_ids=self.ids, attention_mask=torch.ones_like(self.ids)).logits.detach()
