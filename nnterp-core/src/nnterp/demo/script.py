"""The demo's experiments, one function each, on standard names only: the same lines run on every family.

Each takes a model and returns what it measured in plain numbers and words; showing it is for `nnterp.demo.terminal` and
`nnterp.demo.page`, which also shows the function's own source. An experiment first asks `require` whether the values it
reads are there, and Unavailable is raised with the model's own reason where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nnterp.activations import get_token_activations
from nnterp.components import Unavailable
from nnterp.demo import prompts
from nnterp.prompt_utils import Prompt

if TYPE_CHECKING:
    from nnterp.standardized import StandardizedTransformer

#: Wraps a loop that takes a while, as tqdm does.
Progress = Callable[[Iterable], Iterable]


def require(model: StandardizedTransformer, *values: str) -> None:
    """Raise Unavailable where the model, or every block of it, lacks one of these values."""
    support = model.support()
    for value in values:
        reasons = support.get(value, f"no block of this model has a {value.rpartition('.')[0]} module")
        if isinstance(reasons, dict):
            reasons = next(iter(reasons.values())) if len(reasons) == model.num_layers else None
        if reasons is not None:
            raise Unavailable(f"{value}: {reasons}")


# -- what the checkpoint has ------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One value: its axes, how many blocks have it, out of ``of`` (None for one that no block has), and why others do
    not.
    """

    value: str
    axes: str
    blocks: int | None
    of: int | None
    reason: str | None


@dataclass
class Support:
    rows: list[Row]


def support(model: StandardizedTransformer, progress: Progress = iter) -> Support:
    """What this checkpoint has. Runs nothing."""
    of = dict.fromkeys(model.support(layer=0), model.num_layers)
    if "vision" in model.__dict__ and not model.vision.no_images():
        of.update({f"vision.{value}": model.vision.num_layers for value in model.vision.support(layer=0)})
    rows = []
    for value, reasons in model.support().items():
        missing = reasons if isinstance(reasons, dict) else {}
        reason = reasons if isinstance(reasons, str) else next(iter(missing.values()), None)
        blocks = of[value] - len(missing) if value in of else None
        rows.append(Row(value, axes(model, value), blocks, of.get(value), reason))
    return Support(rows)


def block_support(model: StandardizedTransformer, layer: int) -> Support:
    """What one block has."""
    return Support([Row(v, axes(model, v), None, None, reason) for v, reason in model.support(layer).items()])


def axes(model: StandardizedTransformer, value: str) -> str:
    """The axes of a value, ``"batch seq hidden_size"``, from the first place in the model that declares it."""
    *path, name = value.split(".")
    hosts = [model, *model.layers]
    if path[:1] == ["vision"]:
        path, hosts = path[1:], [model.vision, *model.vision.layers]
    for host in hosts:
        for step in path:
            host = getattr(host, step, None)
        declared = type(host).values().get(name) if hasattr(type(host), "values") else None
        if declared is not None:
            return " ".join(declared.dims or ())
    return ""


# -- what it predicts -------------------------------------------------------------------------------------------------


@dataclass
class TopTokens:
    predictions: list[tuple[str, dict[str, float]]]


def top_tokens(model: StandardizedTransformer, progress: Progress) -> TopTokens:
    """The five most likely next tokens of a few prompts."""
    predictions = []
    for prompt in progress(prompts.SIMPLE):
        with torch.no_grad(), model.trace(prompt):
            probs = model.next_token_probs[0].save()
        predictions.append((prompt, model.probs_to_dict(probs, k=5)))
    return TopTokens(predictions)


@dataclass
class Lens:
    """The best token and its probability by block and position, and how the final answer fares at the last one."""

    prompt: str
    tokens: list[str]
    best: list[list[str]]
    confidence: Tensor
    answer: str
    answer_rank: list[int]
    answer_prob: list[float]


def logit_lens(model: StandardizedTransformer, progress: Progress) -> Lens:
    """Read every block's output as if it were the last: the final norm, the head, softmax."""
    require(model, "layer_output", "logits")
    with torch.no_grad(), model.trace(prompts.LENS):
        streams = [].save()
        for layer in model.layers:
            streams.append(layer.layer_output[0])
        answer = model.logits[0, -1].argmax().save()
    best, confidence, rank, prob = [], [], [], []
    for stream in progress(streams):
        with torch.no_grad():
            probs = model.project_on_vocab(stream).float().softmax(-1)
        top = probs.max(-1)
        best.append([model.tokenizer.decode([token]) for token in top.indices])
        confidence.append(top.values.cpu())
        rank.append(int((probs[-1] > probs[-1, answer]).sum()) + 1)
        prob.append(float(probs[-1, answer]))
    answer = model.tokenizer.decode([answer])
    return Lens(prompts.LENS, tokens_of(model, prompts.LENS), best, torch.stack(confidence), answer, rank, prob)


def tokens_of(model: StandardizedTransformer, text: str) -> list[str]:
    """The text of each token the model receives for ``text``."""
    return [model.tokenizer.decode([token]) for token in model.tokenizer(text)["input_ids"]]


# -- an induction head ------------------------------------------------------------------------------------------------


@dataclass
class Induction:
    """Each head's score, the pattern of the best one on the first text, and how well each copy is predicted."""

    blocks: list[int]
    scores: Tensor
    layer: int
    head: int
    tokens: list[str]
    pattern: Tensor
    surprise: tuple[float, float]


def induction(model: StandardizedTransformer, progress: Progress) -> Induction:
    """Find the head that looks at what followed the last time, on random tokens said twice.

    A token of the second copy stands ``n`` places after its first occurrence, and what came next then stands ``n - 1``
    places back: a head's score is the attention it pays there, averaged over the second copy (Olsson et al. 2022,
    "In-context Learning and Induction Heads").
    """
    require(model, "self_attn.attention_probabilities")
    attention = "self_attn.attention_probabilities"
    blocks = [i for i in model.attention_layers if model.support(i)[attention] is None]
    n = prompts.COPY_LENGTH
    half = prompts.random_tokens(model, rows=4, length=n)
    ids = torch.cat([half, half], dim=1)
    with torch.no_grad(), model.trace(ids):
        patterns = [].save()
        for i in progress(blocks):
            patterns.append(model.layers[i].self_attn.attention_probabilities.cpu())
        logits = model.logits.float().cpu().save()
    scores = torch.stack([pattern.diagonal(1 - n, -2, -1)[..., 1:].mean((0, -1)) for pattern in patterns])
    row, head = divmod(int(scores.argmax()), scores.shape[1])
    surprise = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(0)
    return Induction(
        blocks=blocks,
        scores=scores,
        layer=blocks[row],
        head=head,
        tokens=[model.tokenizer.decode([token]) for token in ids[0]],
        pattern=patterns[row][0, head],
        surprise=(float(surprise[: n - 1].mean()), float(surprise[n:].mean())),
    )


# -- where a fact is --------------------------------------------------------------------------------------------------


@dataclass
class Heads:
    """Heads of one block, patched alone at the last position: the share, and the attention they pay to the subject."""

    layer: int
    share: Tensor
    attention: Tensor


@dataclass
class Patching:
    """The share of the other prompt's answer after each patch, ``[layers, positions]``, and in the two clean runs.

    ``share`` is P(source's answer) over the sum of both answers' probabilities. ``heads`` are those of the first block
    whose output at the last position holds the answer, None where no block takes it over or its heads cannot be read.
    """

    source: str
    target: str
    source_answer: str
    target_answer: str
    tokens: list[str]
    subject: int
    share: Tensor
    source_share: float
    target_share: float
    heads: Heads | None

    @property
    def hand_off(self) -> int | None:
        """The first block from which on the answer is at the last position, where it was at the subject before."""
        at_subject, at_end = self.share[:, self.subject] > 0.5, self.share[:, -1] > 0.5
        for layer in range(1, len(self.share)):
            if at_subject[:layer].all() and at_end[layer:].all() and not at_end[:layer].any():
                return layer
        return None


def patching(model: StandardizedTransformer, progress: Progress) -> Patching:
    """Put one run's residual stream into another's, one block and position at a time, and see whose answer comes out.

    All positions of a block are patched in one trace: row ``p`` of the batch is patched at position ``p``.
    """
    require(model, "layer_output", "logits")
    source, target, subject, answers = prompts.two_facts(model)
    with torch.no_grad(), model.trace(source):
        streams = [].save()
        for layer in model.layers:
            streams.append(layer.layer_output[0])
        source_probs = model.next_token_probs.save()
    with torch.no_grad(), model.trace(target):
        target_probs = model.next_token_probs.save()

    positions = torch.arange(len(streams[0]))
    shares = []
    for layer in progress(range(model.num_layers)):
        with torch.no_grad(), model.trace([target] * len(positions)):
            model.layers[layer].layer_output[positions, positions] = streams[layer]
            probs = model.next_token_probs.save()
        shares.append(share_of(answers, "source", probs))

    found = Patching(
        source=source,
        target=target,
        source_answer=answers.target_strings["source"],
        target_answer=answers.target_strings["target"],
        tokens=tokens_of(model, target),
        subject=subject,
        share=torch.stack(shares),
        source_share=float(share_of(answers, "source", source_probs)),
        target_share=float(share_of(answers, "source", target_probs)),
        heads=None,
    )
    if (
        found.hand_off is not None
        and model.support(found.hand_off).get("self_attn.attention_probabilities", "") is None
    ):
        found.heads = moving_heads(model, found, answers)
    return found


def moving_heads(model: StandardizedTransformer, found: Patching, answers: Prompt) -> Heads:
    """Which head of the hand-off block carries the answer: each one's output at the last position, patched alone."""
    attention = model.layers[found.hand_off].self_attn
    with torch.no_grad(), model.trace(found.source):
        outputs = attention.attention_head_outputs[0, -1].save()
    heads = torch.arange(len(outputs))
    with torch.no_grad(), model.trace([found.target] * len(heads)):
        pattern = attention.attention_probabilities[0, :, -1, found.subject].cpu().save()
        attention.attention_head_outputs[heads, -1, heads] = outputs
        probs = model.next_token_probs.save()
    return Heads(found.hand_off, share_of(answers, "source", probs), pattern)


def share_of(answers: Prompt, name: str, probs: Tensor) -> Tensor:
    """Of the probability that goes to any of the prompt's targets, the share of one, ``[batch]``."""
    found = answers.get_target_probs(probs.float().unsqueeze(1), layer=0)
    return found[name] / sum(found.values())


# -- a direction ------------------------------------------------------------------------------------------------------


@dataclass
class Steering:
    """Continuations by factor, and the share of bright words over dark ones against the factor."""

    layer: int
    continuations: list[tuple[str, dict[float, str]]]
    mood_prompt: str
    factors: list[float]
    bright_share: list[float]


def steering(model: StandardizedTransformer, progress: Progress) -> Steering:
    """Add the difference between bright and dark sentences to the stream, and let the model go on."""
    require(model, "layer_output")
    layer = (2 * model.num_layers - 1) // 3
    bright = get_token_activations(model, prompts.BRIGHT, layers=[layer])[0].mean(0)
    dark = get_token_activations(model, prompts.DARK, layers=[layer])[0].mean(0)
    direction = bright - dark

    runs = [(prompt, factor) for prompt in prompts.STEERED for factor in (-1.0, 0.0, 1.0)]
    length = {"max_new_tokens": 20, "min_new_tokens": 20}
    written: dict[str, dict[float, str]] = {prompt: {} for prompt in prompts.STEERED}
    for prompt, factor in progress(runs):
        with torch.no_grad(), model.generate(prompt, **length, do_sample=False) as tracer:
            for _ in tracer.iter[: length["max_new_tokens"]]:
                model.steer(layer, direction, factor=factor)
            ids = tracer.result.save()
        written[prompt][factor] = model.tokenizer.decode(ids[0], skip_special_tokens=True).removeprefix(prompt)

    factors = [f / 4 for f in range(-8, 9)]
    moods = Prompt.from_strings(prompts.MOOD, prompts.MOOD_WORDS, model)
    with torch.no_grad(), model.trace([prompts.MOOD] * len(factors)):
        for row, factor in enumerate(factors):
            model.steer(layer, direction, factor=factor, batch_index=row)
        probs = model.next_token_probs.save()
    return Steering(layer, list(written.items()), prompts.MOOD, factors, share_of(moods, "bright", probs).tolist())
