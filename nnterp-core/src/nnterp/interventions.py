"""Lenses and patches that many papers share, on any family: the logit lens, patchscopes, and an attention patch.

Each takes an nnterp model and texts, runs without gradients and returns probabilities ``[prompts, layers, vocab_size]``
on the CPU, the shape ``nnterp.prompt_utils.run_prompts`` takes::

    logit_lens(model, ["The Eiffel Tower is in the city of"])       # what each block's output says
    patchscope_lens(model, ["The Eiffel Tower"])                    # what the model says when it repeats that output
    run_prompts(model, prompts, get_probs_func=logit_lens)          # either, for named answers

A patchscope (Ghandeharioun et al. 2024, "Patchscopes") puts a hidden state of one run at one position of another
prompt, written so that the model says what it finds there: ``repeat_prompt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nnterp.activations import block_indices, check_position, check_prompts, get_token_activations
from nnterp.components import Unavailable, standard_children

if TYPE_CHECKING:
    from nnterp.standardized import StandardizedTransformer


def logit_lens(
    nn_model: StandardizedTransformer,
    prompts: str | Sequence[str],
    remote: bool = False,
    return_inv_logits: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The next-token probabilities that each block's output projects to, ``[prompts, layers, vocab_size]``.

    The last layer's are the model's own. With ``return_inv_logits`` a second tensor of that shape holds the
    probabilities of the negated logits: what each block's output speaks against.

    Raises:
        ValueError: the tokenizer pads on the right, where the last position is not each prompt's last token.
    """
    check_position(nn_model, -1)
    check_prompts(nn_model, prompts)
    with torch.no_grad(), nn_model.trace(prompts, remote=remote) as tracer:
        hidden = get_token_activations(nn_model, tracer=tracer)
        logits = nn_model.project_on_vocab(hidden).transpose(0, 1)
        probs = logits.softmax(-1).cpu().save()
        inverse = (-logits).softmax(-1).cpu().save() if return_inv_logits else None
    return (probs, inverse) if return_inv_logits else probs


@dataclass
class TargetPrompt:
    """A text to patch into, and the position whose hidden state is replaced (from the end when negative)."""

    prompt: str
    index_to_patch: int


@dataclass
class TargetPromptBatch:
    """One target prompt a row: the texts and the position to patch in each."""

    prompts: list[str]
    index_to_patch: Tensor

    @classmethod
    def from_target_prompts(cls, prompts: Sequence[TargetPrompt]) -> TargetPromptBatch:
        """A batch of these prompts, each at its own position."""
        return cls([p.prompt for p in prompts], torch.tensor([p.index_to_patch for p in prompts]))

    @classmethod
    def from_target_prompt(cls, prompt: TargetPrompt, batch_size: int) -> TargetPromptBatch:
        """``batch_size`` times the same prompt."""
        return cls.from_target_prompts([prompt] * batch_size)

    @classmethod
    def from_prompts(cls, prompts: str | Sequence[str], index_to_patch: int | Sequence[int]) -> TargetPromptBatch:
        """A batch of texts, patched at one position or at one position each.

        Raises:
            ValueError: the number of positions is not the number of texts.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        positions = [index_to_patch] * len(prompts) if isinstance(index_to_patch, int) else list(index_to_patch)
        if len(positions) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(positions)} positions to patch")
        return cls(prompts, torch.tensor(positions))

    @classmethod
    def auto(
        cls, target: TargetPrompt | Sequence[TargetPrompt] | TargetPromptBatch, batch_size: int
    ) -> TargetPromptBatch:
        """``target`` as a batch of ``batch_size``: a single prompt is repeated, several must be that many.

        Raises:
            ValueError: ``target`` holds another number of prompts.
            TypeError: ``target`` is a text, which does not say where to patch.
        """
        if isinstance(target, str):
            raise TypeError(f"a target is a TargetPrompt(text, position to patch), not the text {target!r} alone")
        if isinstance(target, TargetPrompt):
            return cls.from_target_prompt(target, batch_size)
        batch = target if isinstance(target, TargetPromptBatch) else cls.from_target_prompts(target)
        if len(batch) != batch_size:
            raise ValueError(f"{len(batch)} target prompts for {batch_size} hidden states to patch")
        return batch

    def __len__(self) -> int:
        return len(self.prompts)


def repeat_prompt(
    words: Sequence[str] | None = None, rel: str = " ", sep: str = "\n", placeholder: str = "?"
) -> TargetPrompt:
    """A prompt of words said twice, ``"king king\\n1135 1135\\nhello hello\\n?"``, to be patched at its last token.

    The model goes on by repeating what it takes the placeholder to be.
    """
    words = ["king", "1135", "hello"] if words is None else words
    shown = [f"{word}{rel}{word}{sep}" for word in words]
    return TargetPrompt("".join(shown) + placeholder, -1)


def it_repeat_prompt(
    words: Sequence[str] | None = None, rel: str = " ", sep: str = "\n", placeholder: str = "?"
) -> TargetPrompt:
    """``repeat_prompt`` for an instruction-tuned model: the task is spelled out before the examples."""
    target = repeat_prompt(words, rel, sep, placeholder)
    return TargetPrompt(f"Repeat the word at the start of each line.{sep}{sep}{target.prompt}", target.index_to_patch)


def patchscope_lens(
    nn_model: StandardizedTransformer,
    source_prompts: str | Sequence[str] | None = None,
    target_patch_prompts: TargetPrompt | Sequence[TargetPrompt] | TargetPromptBatch | None = None,
    layers: Sequence[int] | None = None,
    latents: Tensor | None = None,
    remote: bool = False,
) -> Tensor:
    """What the model predicts in a target prompt that holds another run's hidden state.

    For each layer, the last token's ``layer_output`` of each source prompt replaces the one at the target's position in
    the same block. Returns next-token probabilities ``[sources, layers, vocab_size]``.

    Args:
        source_prompts: the texts whose hidden states are looked into.
        target_patch_prompts: where they are put, one prompt for all sources or one for each; by default
            `repeat_prompt`.
        layers: the blocks, all by default.
        latents: hidden states ``[layers, sources, hidden_size]`` in place of ``source_prompts``.

    Raises:
        ValueError: not exactly one of ``source_prompts`` and ``latents``, latents that are not one row a layer, or
            target prompts whose positions padding would move.
    """
    layers = block_indices(nn_model, layers)
    if (source_prompts is None) == (latents is None):
        raise ValueError("give exactly one of source_prompts and latents")
    if latents is None:
        latents = get_token_activations(nn_model, source_prompts, layers, remote=remote)
    if latents.dim() != 3 or len(latents) != len(layers):
        raise ValueError(f"latents are [layers, sources, hidden_size] for {len(layers)} layers, not {[*latents.shape]}")
    target = repeat_prompt() if target_patch_prompts is None else target_patch_prompts
    target = TargetPromptBatch.auto(target, latents.shape[1])
    _check_target(nn_model, target.prompts, target.index_to_patch)
    rows = torch.arange(len(target))
    found = []
    for layer, hidden in zip(layers, latents, strict=True):
        with torch.no_grad(), nn_model.trace(target.prompts, remote=remote):
            stream = nn_model.layers[layer].layer_output
            stream[rows, target.index_to_patch] = hidden.to(stream.device, stream.dtype)
            probs = nn_model.next_token_probs.cpu().save()
        found.append(probs)
    return torch.stack(found, dim=1)


def patchscope_generate(
    nn_model: StandardizedTransformer,
    prompts: str | Sequence[str],
    target_patch_prompt: TargetPrompt,
    max_length: int = 50,
    layers: Sequence[int] | None = None,
    remote: bool = False,
    max_batch_size: int = 32,
) -> dict[int, Tensor]:
    """What the model writes after a target prompt that holds another run's hidden state, for each layer.

    As `patchscope_lens`, with the prompt patched once and up to ``max_length`` tokens generated greedily from there.
    Layers and prompts share a batch, up to ``max_batch_size`` rows of it. Returns ``{layer: ids [prompts, tokens]}`` on
    the CPU, the target prompt's own ids first, a row that ended early padded behind.
    """
    layers = block_indices(nn_model, layers)
    latents = get_token_activations(nn_model, prompts, layers, remote=remote)
    hidden = dict(zip(layers, latents, strict=True))
    pairs = [(layer, source) for layer in sorted(hidden) for source in range(latents.shape[1])]
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for start in range(0, len(pairs), max_batch_size):
        chunk = pairs[start : start + max_batch_size]
        texts = [target_patch_prompt.prompt] * len(chunk)
        with (
            torch.no_grad(),
            nn_model.generate(texts, max_new_tokens=max_length, do_sample=False, remote=remote) as tracer,
        ):
            for row, (layer, source) in enumerate(chunk):
                stream = nn_model.layers[layer].layer_output
                patch = hidden[layer][source].to(stream.device, stream.dtype)
                stream[row, target_patch_prompt.index_to_patch] = patch
            ids = tracer.result.cpu().save()
        for (layer, _), written in zip(chunk, ids, strict=True):
            found[layer].append(written)
    padding = nn_model.tokenizer.pad_token_id
    return {layer: pad_sequence(rows, batch_first=True, padding_value=padding) for layer, rows in found.items()}


def patch_object_attn_lens(
    nn_model: StandardizedTransformer,
    source_prompts: str | Sequence[str],
    target_prompts: str | Sequence[str],
    attn_idx_patch: int,
    num_patches: int = 5,
    remote: bool = False,
) -> Tensor:
    """What the target prompt predicts when it attends to a source prompt's last token.

    For each layer, that block's attention and those of the ``num_patches - 1`` blocks after it read, at position
    ``attn_idx_patch`` of the target, what they read at the source's last token. Only the attentions' input changes: the
    stream and the MLPs keep the target's. Returns next-token probabilities ``[prompts, layers, vocab_size]``.

    Raises:
        Unavailable: a block has no softmax attention, or several.
        ValueError: another number of sources than of targets, or targets whose positions padding would move.
    """
    num_layers = len(nn_model.layers)
    one = [layer for layer in nn_model.attention_layers if "self_attn" in standard_children(nn_model.layers[layer])]
    without = sorted(set(range(num_layers)) - set(one))
    if without:
        raise Unavailable(
            f"patch_object_attn_lens edits what every block's self_attn reads; blocks {without} have none, or several"
        )
    sources = [source_prompts] if isinstance(source_prompts, str) else source_prompts
    targets = [target_prompts] if isinstance(target_prompts, str) else target_prompts
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source prompts for {len(targets)} target prompts")
    _check_target(nn_model, targets, torch.tensor([attn_idx_patch]))
    read = get_token_activations(nn_model, sources, get_activations=attention_input, remote=remote)
    found = []
    for first in range(num_layers):
        with torch.no_grad(), nn_model.trace(targets, remote=remote):
            for layer in range(first, min(first + num_patches, num_layers)):
                entering = attention_input(nn_model, layer).clone()
                entering[:, attn_idx_patch] = read[layer].to(entering.device, entering.dtype)
                nn_model.layers[layer].self_attn.input = entering
            probs = nn_model.next_token_probs.cpu().save()
        found.append(probs)
    return torch.stack(found, dim=1)


def attention_input(model: StandardizedTransformer, layer: int) -> Tensor:
    """What block ``layer``'s attention is called with, ``[batch, seq, hidden_size]``, inside a trace."""
    return model.layers[layer].self_attn.input


def _check_target(model: StandardizedTransformer, prompts: Sequence[str], positions: Tensor) -> None:
    """Refuse positions that padding would move: prompts that differ need left padding and count from the end."""
    if len(set(prompts)) == 1:
        return
    check_position(model, -1)
    if bool((positions >= 0).any()):
        raise ValueError("target prompts that differ are padded on the left: give the position to patch from the end")
