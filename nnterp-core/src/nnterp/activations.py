"""Collecting one position's activations over many prompts and layers.

Everything here reads through the standard names, so it runs on any family. What is collected is chosen by a function
of the model and a block index; ``layer_output`` is the default, and any value will do::

    get_token_activations(model, ["The Eiffel Tower is in", "Paris is in"])     # [num_layers, 2, hidden_size]
    get_token_activations(model, prompts, layers=[3], get_activations=lambda m, i: m.layers[i].mlp.mlp_output)

A position counts from one end of the batch's rows, so it depends on where padding goes: a negative ``idx`` needs a
tokenizer that pads on the left (nnsight's default), a positive one a tokenizer that pads on the right. Position 0 is
the row's first, a padding token of a shorter prompt where padding goes left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nnterp.root import listed

if TYPE_CHECKING:
    from nnsight.intervention.tracer import InterleavingTracer

    from nnterp.standardized import StandardizedTransformer

GetActivations = Callable[["StandardizedTransformer", int], Tensor]
"""A value of block ``i``, read inside a trace: ``[batch, seq, ...]``."""


def layer_output(model: StandardizedTransformer, layer: int) -> Tensor:
    """The residual stream leaving block ``layer``, inside a trace."""
    return model.layers[layer].layer_output


def check_position(model: StandardizedTransformer, idx: int) -> None:
    """Refuse a position that could fall on padding: a negative one needs left padding, a positive one right padding.

    Raises:
        ValueError: naming the tokenizer's padding side and the one that ``idx`` needs.
    """
    needed = "left" if idx < 0 else "right" if idx > 0 else None
    side = getattr(model.tokenizer, "padding_side", needed)
    if needed and side != needed:
        raise ValueError(
            f"position {idx} is the same token of every prompt only when prompts are padded on the {needed}, and this "
            f"tokenizer pads on the {side}: load with tokenizer_kwargs={{'padding_side': '{needed}'}}"
        )


def check_prompts(model: StandardizedTransformer, prompts: Any) -> None:
    """Refuse what has no last token: no prompts at all, and a text that the tokenizer makes no token of.

    Raises:
        ValueError: saying which of the two.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(texts, (list, tuple)):
        if not texts:
            raise ValueError("nothing to run: the list of prompts is empty")
        if "" in [text for text in texts if isinstance(text, str)] and not model.tokenizer("")["input_ids"]:
            raise ValueError(
                "one of the prompts is '', of which this tokenizer makes no token: there is none to read at"
            )


def batches(prompts: Any, size: int) -> list:
    """``prompts``, ``size`` at a time. A text, or the token ids of one, is one prompt and not cut up."""
    if size < 1:
        raise ValueError(f"a batch holds one prompt or more, not {size}")
    single = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int))
    prompts = [prompts] if single or getattr(prompts, "ndim", 2) == 1 else prompts
    if not len(prompts):
        raise ValueError("nothing to run: the list of prompts is empty")
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def block_indices(model: StandardizedTransformer, layers: int | Sequence[int] | None) -> list[int]:
    """``layers`` with negative indices counted from the last block; every block for None.

    Raises:
        IndexError: a block that the model does not have.
        ValueError: no blocks.
    """
    indices = list(range(len(model.layers))) if layers is None else [model._index(each) for each in listed(layers)]
    if not indices:
        raise ValueError("layers is empty: give the blocks to read, or None for all of them")
    return indices


def get_token_activations(
    model: StandardizedTransformer,
    prompts: str | Sequence[str] | Any = None,
    layers: Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
    tracer: InterleavingTracer | None = None,
) -> Tensor:
    """One position's activations at each of ``layers``, ``[layers, prompts, ...]``.

    Args:
        prompts: what to run, anything a trace takes. Not used with ``tracer``.
        layers: block indices, all by default; negative ones count from the last block. Read in forward order, returned
            in the order given.
        get_activations: which value; ``layer_output`` by default.
        idx: the position, the last token (-1) by default.
        tracer: a trace that is already open. The result then stays on its device and is not saved, and the trace runs
            on. Without it the call opens a trace of its own, stops it after the last layer and returns a CPU tensor.

    Raises:
        ValueError: ``idx`` could fall on padding (``check_position``), a prompt has no token (``check_prompts``), or
            neither ``prompts`` nor ``tracer`` is given.
    """
    if prompts is None and tracer is None:
        raise ValueError("nothing to run: give prompts, or tracer=, the trace that is already open")
    idx = -1 if idx is None else idx
    check_position(model, idx)
    read = get_activations or layer_output
    indices = block_indices(model, layers)
    if tracer is not None:
        return _stacked(model, indices, read, idx)
    check_prompts(model, prompts)
    with torch.no_grad(), model.trace(prompts, remote=remote) as own_tracer:
        activations = _stacked(model, indices, read, idx).cpu().save()
        own_tracer.stop()
    return activations


def _stacked(model: StandardizedTransformer, layers: Sequence[int], read: GetActivations, idx: int) -> Tensor:
    """Position ``idx`` of what ``read`` gives at ``layers``, read in forward order and stacked in the order given."""
    found = {layer: read(model, layer)[:, idx] for layer in sorted(set(layers))}
    return torch.stack([found[layer] for layer in layers])


def collect_last_token_activations_session(
    model: StandardizedTransformer,
    prompts: Sequence[str],
    batch_size: int,
    layers: Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
) -> Tensor:
    """``get_token_activations`` over batches of prompts in one nnsight session, which is one request when ``remote``.

    ``[layers, prompts, ...]`` on the CPU.
    """
    idx = -1 if idx is None else idx
    check_position(model, idx)
    read = get_activations or layer_output
    indices = block_indices(model, layers)
    check_prompts(model, prompts)
    parts = batches(prompts, batch_size)
    with torch.no_grad(), model.session(remote=remote):
        found = [].save()
        for part in parts:
            with model.trace(part) as tracer:
                found.append(_stacked(model, indices, read, idx).cpu())
                tracer.stop()
    return torch.cat(found, dim=1)


def collect_token_activations_batched(
    model: StandardizedTransformer,
    prompts: Sequence[str],
    batch_size: int,
    layers: Sequence[int] | None = None,
    get_activations: GetActivations | None = None,
    remote: bool = False,
    idx: int | None = None,
    tqdm: Callable[[Iterable], Iterable] | None = None,
    use_session: bool = True,
) -> Tensor:
    """``get_token_activations`` over any number of prompts, ``batch_size`` at a time, ``[layers, prompts, ...]``.

    ``tqdm`` wraps the loop over batches. A remote run sends all batches as one session, without progress, unless
    ``use_session=False`` makes each a request of its own.
    """
    if remote and use_session:
        return collect_last_token_activations_session(
            model, prompts, batch_size, layers, get_activations, remote=remote, idx=idx
        )
    parts = batches(prompts, batch_size)
    found = [
        get_token_activations(model, part, layers, get_activations, remote=remote, idx=idx)
        for part in (tqdm(parts) if tqdm else parts)
    ]
    return torch.cat(found, dim=1)


def compute_next_token_probs(
    model: StandardizedTransformer, prompt: str | Sequence[str] | Any, remote: bool = False
) -> Tensor:
    """The probability of each token to come next, ``[prompts, vocab_size]`` on the CPU, without gradients.

    Raises:
        ValueError: several prompts are padded on the right, where the last position is not each prompt's last token,
            or one has no token (``check_prompts``).
    """
    if not isinstance(prompt, str):
        check_position(model, -1)
    check_prompts(model, prompt)
    with torch.no_grad(), model.trace(prompt, remote=remote):
        probs = model.next_token_probs.cpu().save()
    return probs
