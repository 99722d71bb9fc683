"""What a finding says, in a sentence or two: the words that the terminal and the page share."""

from __future__ import annotations

from functools import singledispatch

from nnterp.demo.script import Induction, Lens, Patching, Steering, Support, TopTokens
from nnterp.demo.seeing import Seen


def quoted(token: str) -> str:
    """A token with its spaces and line breaks to be seen."""
    return f"“{token}”".replace("\n", "\\n").replace("\t", "\\t")


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 or share == 0 else f"{100 * share:.2g}%"


def signed(factor: float) -> str:
    """A factor with its sign; zero without one."""
    return f"{factor:+g}".replace("-", "−") if factor else "0"


@singledispatch
def conclusion(finding: object) -> str:
    """What was found, in words that hold whatever was found."""
    raise TypeError(f"no words for {type(finding).__name__}")


@conclusion.register
def _(finding: Support) -> str:
    here = sum(row.blocks != 0 and (row.blocks is not None or row.reason is None) for row in finding.rows)
    return (
        f"{here} of {len(finding.rows)} values can be read and edited here, under the same names and axes as on every "
        f"other family. model.support() answers without running anything."
    )


@conclusion.register
def _(finding: TopTokens) -> str:
    return "The next tokens the model finds most likely, with their probabilities."


@conclusion.register
def _(finding: Lens) -> str:
    ranks = finding.answer_rank
    leading = next((i for i in range(len(ranks)) if set(ranks[i:]) == {1}), None)
    words = (
        f"After {quoted(finding.prompt)} the model says {quoted(finding.answer)} ({percent(finding.answer_prob[-1])})."
    )
    if not leading:
        return f"{words} Every block's output, read as if it were the last, says so too."
    earlier = min(len(ranks) // 2, leading - 1)
    return (
        f"{words} Reading each block's output as if it were the last, that answer leads from block {leading} on; after "
        f"block {earlier} it is still number {ranks[earlier]:,} in the vocabulary."
    )


@conclusion.register
def _(finding: Induction) -> str:
    first, second = finding.surprise
    score = float(finding.scores.max())
    return (
        f"On random words said twice, head {finding.head} of block {finding.layer} pays {percent(score)} of its "
        f"attention, on average, to the token that followed the current one the first time. The model is surprised by "
        f"{first:.1f} nats a token in the first copy, {second:.1f} in the second."
    )


@conclusion.register
def _(finding: Patching) -> str:
    subject, last = (quoted(finding.tokens[i]) for i in (finding.subject, -1))
    words = (
        f"One place at a time, {quoted(finding.target)} gets the stream of {quoted(finding.source)}. Unpatched, "
        f"{finding.source_answer} has {percent(finding.target_share)} of the probability of the two answers."
    )
    layer = finding.hand_off
    if layer is None:
        best = divmod(int(finding.share.argmax()), finding.share.shape[1])
        return (
            f"{words} The best single place, {quoted(finding.tokens[best[1]])} after block {best[0]}, brings it to "
            f"{percent(float(finding.share[best]))}; no block is seen to hand the answer from {subject} to {last}."
        )
    words += (
        f" Up to block {layer - 1} the place that decides is {subject}; from block {layer} on it is {last}, the last "
        f"token."
    )
    if finding.heads is not None:
        head = int(finding.heads.share.argmax())
        words += (
            f" Head {head} of block {layer} makes the move: it looks from {last} to {subject} "
            f"({percent(float(finding.heads.attention[head]))} of its attention), and patched alone it brings "
            f"{finding.source_answer} to {percent(float(finding.heads.share[head]))}."
        )
    return words


@conclusion.register
def _(finding: Steering) -> str:
    by_factor = dict(zip(finding.factors, finding.bright_share, strict=True))
    return (
        f"The direction is the mean stream after block {finding.layer} of four bright sentences minus that of four "
        f"dark ones. Added with factor −1, 0 and 1, it takes the share of bright words after "
        f"{quoted(finding.mood_prompt)} from {percent(by_factor[-1.0])} over {percent(by_factor[0.0])} to "
        f"{percent(by_factor[1.0])}."
    )


@conclusion.register
def _(finding: Seen) -> str:
    rows, columns = finding.effect.shape
    row, column = divmod(int(finding.effect.argmax()), columns)
    left, top, right, bottom = finding.square
    inside = left <= (column + 0.5) / columns <= right and top <= (row + 0.5) / rows <= bottom
    where = "which is where the square is" if inside else "and the square is elsewhere"
    return (
        f"Asked about a photograph with a square pasted in, “{finding.question} …”, the model says "
        f"{quoted(finding.answer)} ({percent(finding.probability)}). Of the {rows} by {columns} cells, the answer "
        f"hangs most on row {row}, column {column}, {where}: without it, its log probability falls by "
        f"{float(finding.effect.max()):.1f} nats."
    )
