"""What the demo's images are: a piece of a photograph with a coloured square somewhere in it, and a question about it.

A square covers one cell of a grid of eight by eight; some pictures that the toy is trained on have none. Pillow is
imported where a picture is made, so that a checkpoint of text alone needs none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

QUESTION = " The square is"
COLOURS = {"green": (20, 200, 40), "blue": (20, 40, 240), "pink": (255, 60, 200), "cyan": (20, 220, 230)}
"""Colours far from those of the photographs: a red or yellow square is soon taken for a petal of the orange flower."""

MISSING = "missing"
"""The answer where there is no square."""

SIDE, CELLS = 256, 8
"""Pixels of a picture's side, and cells along it."""

HELD_OUT = 384
"""The column from which on no training picture is cut from a photograph, 640 pixels wide."""


@dataclass
class Picture:
    """A piece of a photograph, and the square in it: its cell by row and column, and its colour, or `MISSING`."""

    image: Any
    answer: str
    cell: tuple[int, int]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the square, in pixels."""
        (top, left), size = self.cell, SIDE // CELLS
        return left * size, top * size, (left + 1) * size, (top + 1) * size


def photographs() -> list[Any]:
    """The two photographs of `nnterp.checkpoints`, opened. Raises FetchError where they cannot be fetched."""
    from PIL import Image

    from nnterp.checkpoints import photographs

    return [Image.open(path).convert("RGB") for path in photographs()]


def picture(photograph: Any, corner: tuple[int, int], answer: str, cell: tuple[int, int]) -> Picture:
    """The piece of ``photograph`` whose left and upper edges are at ``corner``, with the square pasted into it."""
    left, top = corner
    made = Picture(photograph.crop((left, top, left + SIDE, top + SIDE)), answer, cell)
    if answer != MISSING:
        made.image.paste(COLOURS[answer], made.box)
    return made


def random_picture(photographs: list[Any], chance: random.Random) -> Picture:
    """One of the pictures that the toy is trained on, cut from before the column `HELD_OUT`; one in five is bare."""
    photograph = chance.choice(photographs)
    corner = chance.randint(0, HELD_OUT - SIDE), chance.randint(0, photograph.size[1] - SIDE)
    cell = chance.randrange(CELLS), chance.randrange(CELLS)
    return picture(photograph, corner, chance.choice([*COLOURS, MISSING]), cell)


def held_out() -> Picture:
    """What the demo asks about: a piece of the temple's photograph that no training picture shows, a square in it."""
    return picture(photographs()[0], (HELD_OUT, 40), "blue", (6, 1))
