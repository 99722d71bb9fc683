"""Measuring two things against each other on a machine that does other work at the same time.

The subjects of a comparison take turns in a shuffled order within one process, so what slows the machine slows all of
them. What is counted is the process's own CPU time, with the garbage collector off. Other processes still cost it
caches and clock speed, which only ever makes a turn slower: `Samples.typical` is the mean of a subject's faster half.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any


class Samples:
    """CPU seconds of every turn, by subject."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def typical(self, subject: str) -> float:
        """The mean of the faster half of the subject's turns."""
        turns = sorted(self.seconds[subject])
        return mean(turns[: (len(turns) + 1) // 2])

    def interleave(
        self, subjects: Mapping[str, Callable[[Any], Any]], turns: int, prepare: Callable[[], Any] = lambda: None
    ) -> None:
        """Give every subject ``turns`` turns, each on what ``prepare`` returns, which is not counted."""
        order = list(subjects)
        shuffle = random.Random(0).shuffle
        gc.collect()
        gc.freeze()  # what is there already need not be looked through again
        gc.disable()
        for _ in range(turns):
            shuffle(order)
            for name in order:
                argument = prepare()
                started = time.process_time()
                kept = subjects[name](argument)
                self.seconds[name].append(time.process_time() - started)
                del argument, kept
            gc.collect()
        gc.enable()
        gc.unfreeze()


@dataclass(frozen=True)
class Row:
    """One line of the table: ``nnterp`` and ``reference`` in ``unit``, and the largest ratio of the two accepted."""

    what: str
    against: str
    nnterp: float
    reference: float
    bound: float | None = None
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.nnterp / self.reference

    @property
    def ok(self) -> bool | None:
        return None if self.bound is None else self.ratio <= self.bound


def in_ms(what: str, against: str, samples: Samples, nnterp: str, reference: str, bound: float | None = None) -> Row:
    """The row that compares two subjects of ``samples``."""
    return Row(what, against, samples.typical(nnterp) * 1e3, samples.typical(reference) * 1e3, bound)


def table(rows: Iterable[Row]) -> str:
    head = ("what", "reference", "nnterp", "reference", "", "ratio", "bound", "ok")
    lines = [head] + [
        (
            row.what,
            row.against,
            f"{row.nnterp:.2f}",
            f"{row.reference:.2f}",
            row.unit,
            f"{row.ratio:.3f}",
            "" if row.bound is None else f"{row.bound:.2f}",
            {True: "yes", False: "NO", None: ""}[row.ok],
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(width) if column in (0, 1, 4) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])
