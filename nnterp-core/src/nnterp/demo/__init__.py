"""`nnterp demo`: what nnterp is for, shown on a checkpoint in a few minutes.

`run` loads each checkpoint, puts it through the experiments of `nnterp.demo.script`, prints what they found and writes
one HTML page that loads nothing else. The script is the same for every checkpoint and names no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnterp import StandardizedTransformer, Unavailable, wrappers
from nnterp.demo import script
from nnterp.demo.prepared import PREPARED, CannotLoad, load
from nnterp.demo.seeing import seeing
from nnterp.demo.terminal import Terminal
from nnterp.demo.wording import conclusion

EXPERIMENTS: dict[str, Callable] = {
    "What this checkpoint has": script.support,
    "What it predicts": script.top_tokens,
    "Logit lens: an answer forming, block by block": script.logit_lens,
    "An induction head": script.induction,
    "Activation patching: where a fact is": script.patching,
    "Steering: a direction for mood": script.steering,
}

#: What a multimodal checkpoint is put through before these.
OF_IMAGES: dict[str, Callable] = {"A photograph: where the answer is": seeing}


@dataclass
class Section:
    """One experiment on one checkpoint: its finding, or the reason why there is none."""

    title: str
    experiment: Callable
    finding: Any | None
    reason: str | None = None


@dataclass
class Examined:
    """A checkpoint with what was found on it."""

    name: str
    note: str
    facts: dict[str, str]
    sections: list[Section]


def run(names: Sequence[str], html: Path | None, terminal: Terminal | None = None, **kwargs: Any) -> list[Examined]:
    """Examine checkpoints one after the other, print the findings and write them to ``html`` (None writes nothing).

    ``names`` are directories, hub ids or names in `nnterp.demo.prepared`; ``kwargs`` go to `StandardizedTransformer`.
    Raises CannotLoad for a name that is no checkpoint, or one without a tokenizer.
    """
    terminal = terminal or Terminal()
    examined = []
    for name in names:
        with terminal.waiting(f"loading {name}"):
            model = load(name, terminal.step, dispatch=True, attn_implementation="eager", **kwargs)
        if model.tokenizer is None or not model.tokenizer("text")["input_ids"]:
            raise CannotLoad(f"{name!r} has no tokenizer, and the demo reads text")
        note = PREPARED[name].note if name in PREPARED else ""
        terminal.title(name, note)
        examined.append(Examined(name, note, facts(model), []))
        terminal.paragraph(", ".join(f"{fact} {value}" for fact, value in examined[-1].facts.items()))
        images = OF_IMAGES if wrappers.multimodal(model) else {}
        for title, experiment in {**images, **EXPERIMENTS}.items():
            examined[-1].sections.append(examine(model, title, experiment, terminal))
    if html is not None:
        from nnterp.demo.page import page

        with terminal.waiting("writing the page"):
            html.write_text(page(examined), encoding="utf-8")
        terminal.line()
        terminal.line(f"{terminal.bold('The same with plots:')} {html}")
    return examined


def facts(model: StandardizedTransformer) -> dict[str, str]:
    """What a reader wants to know of a model first."""
    parameters = sum(parameter.numel() for parameter in model._module.parameters())
    return {
        "family": model.family.__name__.rpartition(".")[2],
        "parameters": f"{parameters / 1e6:,.1f} M",
        "blocks": str(model.num_layers),
        "width": f"{model.hidden_size:,}",
        "vocabulary": f"{model.vocab_size:,}",
    }


def examine(model: StandardizedTransformer, title: str, experiment: Callable, terminal: Terminal) -> Section:
    """Run one experiment and print it; where the checkpoint lacks a value it reads, print the reason."""
    terminal.heading(title)
    try:
        with terminal.waiting(title.partition(":")[0].lower()) as progress:
            finding = experiment(model, progress)
    except Unavailable as error:
        terminal.paragraph(f"Not on this checkpoint: {error}")
        return Section(title, experiment, None, str(error))
    terminal.paragraph(conclusion(finding))
    terminal.line()
    terminal.show(finding)
    return Section(title, experiment, finding)
