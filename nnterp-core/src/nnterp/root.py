"""What a standardized model is on any engine: a family, its sizes, its availability, and the methods over its
values.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nnterp import order
from nnterp.components.standard import Standard, blocks_support, every_row, lists_of, standard_children
from nnterp.sizes import StandardizedCapability, StandardizedProperty, text_config


class Standardized(Standard):
    """What a standardized model is on any engine: a family, its sizes, its availability, and methods over its values.

    Written against the standard names only. A leaf class resolves the family, hands its maps to nnsight and defines the
    root's values where its engine keeps them.
    """

    ROLE = "model"
    family: Any

    def _unknown(self, name: str) -> str:
        if name == "layers":
            return (
                f"{self.path} ({type(self._module).__name__}) has no 'layers': the family's RENAME has to say which "
                f"module holds the blocks"
            )
        return Standard._unknown(self, name)

    # -- sizes ------------------------------------------------------------------------------------------------------

    @StandardizedProperty
    def num_layers(self) -> int:
        """Number of decoder blocks."""
        return len(self.layers)

    @StandardizedProperty
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return text_config(self).hidden_size

    @StandardizedProperty
    def vocab_size(self) -> int:
        """Entries of the vocabulary: columns of the logits."""
        return text_config(self).vocab_size

    @StandardizedProperty
    def num_heads(self) -> int:
        """Query heads of an attention."""
        return text_config(self).num_attention_heads

    @StandardizedProperty
    def num_kv_heads(self) -> int:
        """Key/value heads: fewer than `num_heads` under grouped-query attention."""
        return getattr(text_config(self), "num_key_value_heads", None) or self.num_heads

    @StandardizedProperty
    def head_dim(self) -> int:
        """Width of one head: the config's own where it says, else ``hidden_size // num_heads``."""
        return getattr(text_config(self), "head_dim", None) or self.hidden_size // self.num_heads

    @StandardizedProperty
    def qk_head_dim(self) -> int:
        """Width of one head's queries and keys: `head_dim`, unless the family separates them."""
        return self.head_dim

    @StandardizedProperty
    def intermediate_size(self) -> int:
        """Width of the dense MLP's hidden layer."""
        return text_config(self).intermediate_size

    # -- which block has what -----------------------------------------------------------------------------------------

    def _blocks_with(self, name: str) -> list[int]:
        return [
            i
            for i, block in enumerate(self.layers)
            if isinstance(block.__dict__.get(name), Standard) or name in lists_of(block)
        ]

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the blocks with softmax attention (``self_attn``, or a list of them)."""
        return self._blocks_with("self_attn")

    @property
    def cross_attention_layers(self) -> list[int]:
        """Indices of the blocks that attend to an image (``cross_attn``)."""
        return self._blocks_with("cross_attn")

    @property
    def linear_attention_layers(self) -> list[int]:
        """Indices of the blocks with a recurrent mixer (``linear_attn``)."""
        return self._blocks_with("linear_attn")

    @property
    def mlp_layers(self) -> list[int]:
        """Indices of the blocks with a feed-forward module (``mlp``), mixtures included."""
        return self._blocks_with("mlp")

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the blocks whose feed-forward is a mixture of experts."""
        return [i for i in self.mlp_layers if getattr(self.layers[i].mlp, "num_experts", None)]

    # -- availability -----------------------------------------------------------------------------------------------

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Which values this checkpoint has. Runs nothing and loads nothing.

        With ``layer``, the values of that block by dotted name (``"layer_output"``,
        ``"self_attn.attention_probabilities"``): None where available, else the reason, also for what another block has
        and this one lacks. Without, the root's values and every block value: None when every block has it, else
        ``{layer: reason}`` for the blocks that do not.
        """
        if layer is not None:
            return every_row(self.layers)[self._index(layer)]
        rows: dict[str, Any] = Standard.support(self)
        rows.update(blocks_support(self.layers))
        for name, child in standard_children(self).items():
            rows.update({f"{name}.{value}": reason for value, reason in child.support().items()})
        return rows

    def _index(self, layer: int) -> int:
        """``layer`` as an index from 0; IndexError past the ends."""
        if isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise TypeError(f"a layer is an int, not {type(layer).__name__} ({layer!r})")
        layer = operator.index(layer)
        if not -self.num_layers <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is out of range: the model has {self.num_layers} blocks")
        return layer % self.num_layers

    def order(self, layer: int | None = None) -> dict[str, int]:
        """The available values in forward order, name to rank; equal ranks are one location, either may be read first.

        With ``layer``, that block's values by dotted name, from 0. Without, the root's, numbered across the whole
        forward. Measured by one run on first use (`nnterp.order.probe`) and kept on the model.
        """
        return order.of(self, None if layer is None else self._index(layer))

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        """Where a value falls in the forward, as ``(side, rank)``, which sorts reads into forward order.

        ``side`` is -1 for a root value served before the blocks, ``num_layers`` after them, else the block's index;
        ``rank`` is `order`'s. Raises Unavailable where the checkpoint has no such value, KeyError where there is none
        of that name (a block value needs ``layer=``).
        """
        return order.rank(self, name, None if layer is None else self._index(layer))

    # -- methods over the values --------------------------------------------------------------------------------------

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None:
        """Skip one block: `skip_layers` from and to ``layer``."""
        self.skip_layers(layer, layer, skip_with)

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None:
        """Skip blocks ``start`` through ``end`` inclusive, inside a trace before they run.

        The stream entering ``start`` (or ``skip_with``, ``[batch, seq, hidden_size]``) goes straight to the block after
        ``end``. Negative indices count from the end. With several invokes, every one has to skip the same blocks. In
        ``generate`` skip them at every step (``tracer.iter``): a block that runs at some steps only has no keys of the
        others to attend to, and fails where its part of the cache then has another length than the mask.
        """
        first, last = self._index(start), self._index(end)
        if first > last:
            raise ValueError(f"skip_layers({start}, {end}): block {first} comes after block {last}")
        hidden = self.layers[first].layer_input if skip_with is None else skip_with
        for index in range(first, last + 1):
            self.layers[index].skip_with(hidden)

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        token_positions: int | Sequence[int] | Tensor | slice | None = None,
        batch_index: int | Sequence[int] | Tensor | slice | None = None,
    ) -> None:
        """Add ``factor * vector`` to the stream leaving each of ``layers``, in place, inside a trace.

        Args:
            layers: Block indices, ascending: the order in which they run.
            vector: ``[hidden_size]``, or anything that broadcasts to the selected positions and has that last axis.
            Moved to
                the stream's dtype and device.
            factor: Its multiplier.
            token_positions: The positions to add it at; all by default.
            batch_index: The row or rows to add it to, at each of the positions; all by default.
        """
        if not isinstance(vector, Tensor) or vector.dim() == 0 or vector.shape[-1] != self.hidden_size:
            got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"steer takes a vector of width {self.hidden_size} (hidden_size), not {got}")
        indices = [self._index(layer) for layer in listed(layers)]
        if indices != sorted(indices):
            raise ValueError(f"steer adds as the blocks run: give layers in ascending order, not {layers}")
        rows = slice(None) if batch_index is None else listed(batch_index)
        at = slice(None) if token_positions is None else listed(token_positions)
        if isinstance(rows, list) and isinstance(at, list):
            rows = torch.tensor(rows)[:, None]  # every row at every position, not pairs
        for index in indices:
            stream = self.layers[index].layer_output
            stream[rows, at] += factor * vector.to(stream.device, stream.dtype)

    @StandardizedCapability
    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """Logits of a residual-stream tensor ``[..., hidden_size]``: final norm, head, and what the model does after
        it.

        The logit lens: of a block's ``layer_output``, that block's prediction; of the last block's, ``logits``. Inside
        a trace on a live value, outside on a saved one. After the head, the text config's ``final_logit_softcapping``
        where set; a family whose model does something else defines ``project_on_vocab(model, hidden)`` in its module.
        """
        return soft_capped(self, self.lm_head(self.norm(hidden)))

    def get_topk_closest_tokens(self, hidden: Tensor, k: int = 5) -> list[dict[str, float]]:
        """The ``k`` most likely next tokens at each position of ``hidden``, ``[..., hidden_size]``.

        `project_on_vocab`, softmax, then `probs_to_dict`: one ``{token: probability}`` per position, in row-major order
        over the leading dimensions.
        """
        probs = self.project_on_vocab(hidden).softmax(-1)
        return [self.probs_to_dict(row, k) for row in probs.reshape(-1, probs.shape[-1])]

    def probs_to_dict(self, probs: Tensor, k: int = 5) -> dict[str, float]:
        """The ``k`` most likely tokens of one ``[vocab_size]`` distribution, as ``{token: probability}``, most
        likely first.

        Keyed by decoded text. Where several of the ``k`` decode to the same text (bytes of a character all decode to
        ``�``), those are keyed by the tokenizer's own vocabulary entry, with the id appended should even that repeat:
        always ``k`` entries.
        """
        if probs.dim() != 1:
            raise ValueError(f"probs_to_dict takes one distribution [vocab_size], not shape {tuple(probs.shape)}")
        self._require_tokenizer("probs_to_dict names tokens")
        values, ids = probs.topk(k)
        ids = ids.tolist()
        names = [self.tokenizer.decode([token]) for token in ids]
        raw = self.tokenizer.convert_ids_to_tokens(ids)
        names = [entry if names.count(name) > 1 else name for name, entry in zip(names, raw, strict=True)]
        names = [f"{n}#{i}" if names.count(n) > 1 else n for n, i in zip(names, ids, strict=True)]
        return dict(zip(names, values.tolist(), strict=True))

    def _require_tokenizer(self, why: str) -> None:
        if self.tokenizer is None:
            raise ValueError(f"{why}, and this model has no tokenizer: pass tokenizer= where it is built")


def listed(places: Any) -> list | slice:
    """One place or several, however they are given, as a list; a slice as it is."""
    if isinstance(places, slice):
        return places
    places = places.tolist() if hasattr(places, "tolist") else places  # a tensor's or an array's
    return list(places) if isinstance(places, Iterable) else [places]


def soft_capped(model: Standardized, logits: Tensor) -> Tensor:
    """``logits`` through the text config's ``final_logit_softcapping``, where it is set."""
    cap = getattr(text_config(model), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
