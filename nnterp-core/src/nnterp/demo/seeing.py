"""What a multimodal checkpoint looks at in a photograph: the demo's experiment on the image side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnterp.checkpoints import FetchError
from nnterp.components import Unavailable
from nnterp.demo import pictures
from nnterp.demo.script import Progress
from nnterp.images import placeholder

if TYPE_CHECKING:
    from nnterp.components.vision.tower import Vision
    from nnterp.standardized import StandardizedTransformer

#: Cells along a side of the map, where an image has more patches than that: each is a run.
CELLS = 8


@dataclass
class Seen:
    """What the model says of a photograph, and how much of it hangs on each cell of it.

    ``effect`` is the fall of the answer's log probability without the cell, in nats, by row and column; ``square`` is
    where the square is in the picture, as shares of its sides: left, top, right, bottom.
    """

    question: str
    answer: str
    probability: float
    image: Any
    square: tuple[float, float, float, float]
    effect: Tensor


def seeing(model: StandardizedTransformer, progress: Progress) -> Seen:
    """Take one cell of a photograph after the other out of the tower, and see how much the answer falls.

    A cell is taken out where its patches leave the tower's first block: they become the mean of all patches there.
    ``vision.patch_map`` says which positions of the tower lie in which cell.
    """
    vision, shown = image_side(model), held_out()
    prompt = f"{placeholder(model)}{pictures.QUESTION}"
    with torch.no_grad(), model.trace(prompt, images=[shown.image]):
        stream = vision.layers[0].layer_output.save()
        grid = vision.grid.save()
        probabilities = model.next_token_probs[0].save()
    if len(grid) != 1:
        raise Unavailable(f"this model cuts a picture into {len(grid)} pieces, and the map is of one")
    answer = int(probabilities.argmax())

    positions = vision.patch_map(torch.arange(stream.shape[1]).expand(stream.shape[:2]), grid)[0]
    cells = [row.split(-(-row.shape[1] // CELLS), dim=1) for row in positions.split(-(-len(positions) // CELLS))]
    effect = torch.zeros(len(cells), len(cells[0]))
    for row, column in progress([(i, j) for i in range(len(cells)) for j in range(len(cells[0]))]):
        with torch.no_grad(), model.trace(prompt, images=[shown.image]):
            vision.layers[0].layer_output[0, cells[row][column].flatten()] = stream[0].mean(0)
            without = model.next_token_probs[0, answer].save()
        effect[row, column] = (probabilities[answer].log() - without.log()).item()
    square = tuple(edge / pictures.SIDE for edge in shown.box)
    word = model.tokenizer.decode([answer])
    return Seen(pictures.QUESTION.strip(), word, float(probabilities[answer]), shown.image, square, effect)


def image_side(model: StandardizedTransformer) -> Vision:
    """``model.vision``; Unavailable, with the reason, where this load of a multimodal checkpoint has none."""
    try:
        vision = model.vision
    except AttributeError as error:
        raise Unavailable(str(error)) from error
    if reason := vision.no_images():
        raise Unavailable(reason)
    return vision


def held_out() -> pictures.Picture:
    """The picture to ask about; Unavailable, with the reason, where its photograph cannot be fetched."""
    try:
        return pictures.held_out()
    except FetchError as error:
        raise Unavailable(f"the demo has no photograph: {error}") from error
