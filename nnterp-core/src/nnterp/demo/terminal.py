"""The demo in a terminal: tables, shaded cells, progress where it waits.

Colour and the moving progress line need a terminal; in a pipe, or with ``NO_COLOR`` set, the same text comes plain.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatchmethod
from typing import TextIO

from torch import Tensor

from nnterp.demo.script import Induction, Lens, Patching, Steering, Support, TopTokens
from nnterp.demo.seeing import Seen
from nnterp.demo.wording import quoted, signed

SHADES = " ░▒▓█"
BARS = "▏▎▍▌▋▊▉█"


class Terminal:
    """Prints findings and progress to a stream, 100 columns wide at most."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.is_terminal = self.stream.isatty()
        self.colour = self.is_terminal and not os.environ.get("NO_COLOR")
        self.width = min(100, shutil.get_terminal_size((100, 24)).columns)

    # -- words ------------------------------------------------------------------------------------------------------

    def line(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self.colour else text

    def dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self.colour else text

    def title(self, text: str, note: str = "") -> None:
        self.line()
        self.line(self.bold(text))
        self.line("═" * min(self.width, max(len(text), 8)))
        if note:
            self.paragraph(note)

    def heading(self, text: str) -> None:
        self.line()
        self.line(f"{self.bold(text)} {self.dim('─' * max(3, self.width - len(text) - 1))}")

    def paragraph(self, text: str, indent: int = 0, hanging: int = 0) -> None:
        """Text broken to the width, ``indent`` spaces before it and ``hanging`` more from the second line on."""
        first, rest = " " * indent, " " * (indent + hanging)
        self.line(textwrap.fill(" ".join(text.split()), self.width, initial_indent=first, subsequent_indent=rest))

    def table(self, rows: Sequence[Sequence[str]], head: Sequence[str], right: Sequence[int] = ()) -> None:
        """Columns as wide as their widest cell; those in ``right`` are aligned on the right, the last is cut to fit."""
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for number, row in enumerate([head, *rows] if any(head) else rows, start=0 if any(head) else 1):
            cells = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            text = "  ".join(cells).rstrip()
            text = text if len(text) <= self.width else f"{text[: self.width - 1]}…"
            self.line(self.dim(text) if number == 0 else text)

    # -- findings -----------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def show(self, finding: object) -> None:
        """Print a finding's numbers."""
        raise TypeError(f"no table for {type(finding).__name__}")

    @show.register
    def _(self, finding: Support) -> None:
        rows, notes = [], {}
        for row in finding.rows:
            mark = "" if row.reason is None else f" [{notes.setdefault(row.reason, len(notes) + 1)}]"
            where = ("yes" if row.reason is None else "no") if row.blocks is None else f"{row.blocks} of {row.of}"
            rows.append((row.value, where + mark, row.axes))
        self.table(rows, ("value", "blocks", "axes"))
        for reason, number in notes.items():
            self.paragraph(f"[{number}] {reason}")

    @show.register
    def _(self, finding: TopTokens) -> None:
        for prompt, tokens in finding.predictions:
            self.line(f"  {prompt}")
            rows = [(f"    {quoted(token)}", f"{prob:.3f}", bar(prob, 24)) for token, prob in tokens.items()]
            self.table(rows, ("", "", ""), right=[1])

    @show.register
    def _(self, finding: Lens) -> None:
        rows = []
        for layer, (best, confidence) in enumerate(zip(finding.best, finding.confidence[:, -1], strict=True)):
            rank, prob = finding.answer_rank[layer], finding.answer_prob[layer]
            rows.append((str(layer), quoted(best[-1]), f"{confidence:.2f}", f"{rank:,}", f"{prob:.3f}", bar(prob, 24)))
        answer = quoted(finding.answer)
        self.table(rows, ("block", "says", "prob", f"rank of {answer}", "prob", ""), right=[0, 2, 3, 4])

    @show.register
    def _(self, finding: Induction) -> None:
        order = finding.scores.flatten().argsort(descending=True)[:5].tolist()
        rows = []
        for index in order:
            row, head = divmod(index, finding.scores.shape[1])
            score = float(finding.scores[row, head])
            rows.append((str(finding.blocks[row]), str(head), f"{score:.2f}", bar(score, 24)))
        self.table(rows, ("block", "head", "score", ""), right=[0, 1, 2])
        n = len(finding.tokens) // 2
        self.line()
        self.line(
            f"Attention of head {finding.head} of block {finding.layer}, from the second copy (rows) to both copies:"
        )
        margin = max(len(token) for token in finding.tokens[n:])
        for token, row in zip(finding.tokens[n:], finding.pattern[n:], strict=True):
            self.line(f"  {token.strip().rjust(margin)} {''.join(2 * shade(float(p)) for p in row)}".rstrip())

    @show.register
    def _(self, finding: Patching) -> None:
        self.line(
            f"Share of {finding.source_answer} over {finding.target_answer}, by block and patched position, in %:"
        )
        names = [token.strip() or quoted(token) for token in finding.tokens]
        rows = [(layers, *cells) for layers, cells in merged(finding.share)]
        self.table(rows, ("block", *names), right=range(1, len(names) + 1))
        if finding.heads is not None:
            self.line()
            self.line(f"The heads of block {finding.heads.layer}, patched alone at the last token:")
            rows = [
                (str(head), f"{attention:.2f}", f"{100 * share:.0f}%", bar(share, 24))
                for head, (attention, share) in enumerate(
                    zip(finding.heads.attention.tolist(), finding.heads.share.tolist(), strict=True)
                )
            ]
            head = ("head", f"attention to {quoted(finding.tokens[finding.subject])}", finding.source_answer, "")
            self.table(rows, head, right=[0, 1, 2])

    @show.register
    def _(self, finding: Steering) -> None:
        for prompt, written in finding.continuations:
            self.line(f"  {prompt}")
            for factor, text in written.items():
                self.paragraph(f"{signed(factor):>2}  … {text}", indent=4, hanging=6)
        self.line()
        rows = [
            (signed(factor), f"{share:.2f}", bar(share, 24))
            for factor, share in zip(finding.factors, finding.bright_share, strict=True)
            if (2 * factor).is_integer()
        ]
        self.table(rows, ("factor", "bright share", ""), right=[0, 1])

    @show.register
    def _(self, finding: Seen) -> None:
        self.line("How far the answer falls without each cell of the photograph:")
        most = max(float(finding.effect.max()), 1e-6)
        edge = "──" * finding.effect.shape[1]
        self.line(f"  ┌{edge}┐")
        for row in finding.effect:
            self.line(f"  │{''.join(2 * shade(max(float(effect), 0.0) / most) for effect in row)}│")
        self.line(f"  └{edge}┘")

    # -- waiting ------------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, label: str) -> Iterator[Callable[[Iterable], Iterable]]:
        """Say what is being waited for and, at the end, how long it took. Yields a wrapper that counts a loop's turns.

        In a terminal one line is rewritten; in a pipe the label and the time are printed once each.
        """
        start = time.monotonic()
        self._status(f"… {label}")

        def counted(items: Iterable) -> Iterable:
            total = len(items)
            for turn, item in enumerate(items):
                if self.is_terminal:
                    self._status(f"… {label}  {turn}/{total}")
                yield item

        yield counted
        self._status("")
        self.line(self.dim(f"✓ {label}  {time.monotonic() - start:.1f} s"))

    def step(self, text: str) -> None:
        """Say what happens next inside something that is waited for."""
        self._status("")
        self.line(self.dim(f"  {text}"))

    def _status(self, text: str) -> None:
        if self.is_terminal:
            print(f"\r\033[K{self.dim(text)}", end="", file=self.stream, flush=True)
        elif text:
            self.line(text)


def bar(share: float, width: int) -> str:
    """A horizontal bar of at most ``width`` cells."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (BARS[eighths % 8 - 1] if eighths % 8 else "")


def shade(share: float) -> str:
    """One cell, darker for more."""
    return SHADES[min(len(SHADES) - 1, int(share * (len(SHADES) - 1) + 0.6))]


def merged(share: Tensor) -> list[tuple[str, list[str]]]:
    """The rows of a table in percent, consecutive blocks that read the same (to a tenth) in one row."""
    rows = []
    for layers in _runs((share * 10).round().tolist()):
        cells = [f"{100 * value:.0f}" for value in share[layers].mean(0).tolist()]
        rows.append((str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}", cells))
    return rows


def _runs(rows: list) -> list[list[int]]:
    """Consecutive indices of equal entries."""
    return [[i for i, _ in group] for _, group in itertools.groupby(enumerate(rows), key=lambda pair: pair[1])]
