"""The axes of every value, as jaxtyping types.

A value has one layout, the same on every family. ``isinstance(tensor, Residual)`` checks rank and dtype; the axis names
say what each dimension is. An axis that is a fact about the model carries the name of the size that holds it
(``hidden_size``, ``num_heads``), so `nnterp.axis_size` can resolve it; the others (``batch``, ``seq``, ``query``,
``key``, ``tokens``) are facts about one call.
"""

from types import ModuleType
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

BATCH = "batch"
SEQ = "seq"
QUERY = "query"
KEY = "key"
TOKENS = "tokens"
HIDDEN = "hidden_size"
VOCAB = "vocab_size"
HEADS = "num_heads"
KV_HEADS = "num_kv_heads"
HEAD_DIM = "head_dim"
QK_HEAD_DIM = "qk_head_dim"
INTERMEDIATE = "intermediate_size"
STREAMS = "streams"

#: One vector of the residual stream per token, ``[batch, seq, hidden_size]``.
Residual = Float[Tensor, f"{BATCH} {SEQ} {HIDDEN}"]
#: The stream with batch and sequence flattened, ``[tokens, hidden_size]`` (OPT, between its sublayers).
FlatResidual = Float[Tensor, f"{TOKENS} {HIDDEN}"]
#: Several residual streams per token, ``[batch, seq, streams, hidden_size]`` (hyper-connections).
Streams = Float[Tensor, f"{BATCH} {SEQ} {STREAMS} {HIDDEN}"]
#: One number per stream and token, ``[batch, seq, streams]``: how much of a contribution each stream gets.
StreamWeights = Float[Tensor, f"{BATCH} {SEQ} {STREAMS}"]
#: One number per pair of streams and token, ``[batch, seq, streams, streams]``: from the first to the second.
StreamMixing = Float[Tensor, f"{BATCH} {SEQ} {STREAMS} {STREAMS}"]
#: One score per vocabulary entry and token, ``[batch, seq, vocab_size]``.
Logits = Float[Tensor, f"{BATCH} {SEQ} {VOCAB}"]
#: A distribution over the next token of each row, ``[batch, vocab_size]``.
NextTokenProbs = Float[Tensor, f"{BATCH} {VOCAB}"]
#: Integers per token, ``[batch, seq]``: token ids, an attention mask.
Tokens = Int[Tensor, f"{BATCH} {SEQ}"]
#: ``[batch, num_heads, seq, qk_head_dim]``.
Queries = Float[Tensor, f"{BATCH} {HEADS} {SEQ} {QK_HEAD_DIM}"]
#: ``[batch, num_kv_heads, seq, qk_head_dim]``: one per key/value head, before they are repeated for the query heads.
Keys = Float[Tensor, f"{BATCH} {KV_HEADS} {SEQ} {QK_HEAD_DIM}"]
#: ``[batch, num_kv_heads, seq, head_dim]``.
Values = Float[Tensor, f"{BATCH} {KV_HEADS} {SEQ} {HEAD_DIM}"]
#: ``[batch, num_kv_heads, key, qk_head_dim]``: of what a cross-attention attends to, which are no tokens of the prompt.
CrossKeys = Float[Tensor, f"{BATCH} {KV_HEADS} {KEY} {QK_HEAD_DIM}"]
#: ``[batch, num_kv_heads, key, head_dim]``, likewise.
CrossValues = Float[Tensor, f"{BATCH} {KV_HEADS} {KEY} {HEAD_DIM}"]
#: One number per head and pair of tokens, ``[batch, num_heads, query, key]``.
Pattern = Float[Tensor, f"{BATCH} {HEADS} {QUERY} {KEY}"]
#: ``[batch, seq, num_heads, head_dim]``: sequence first again, as heads are concatenated.
HeadOutputs = Float[Tensor, f"{BATCH} {SEQ} {HEADS} {HEAD_DIM}"]
#: ``[batch, seq, intermediate_size]``.
Neurons = Float[Tensor, f"{BATCH} {SEQ} {INTERMEDIATE}"]


def axes(layout: Any) -> str:
    """The axes of a layout as its docs show them: ``[batch, seq, hidden_size]``."""
    return f"[{', '.join(layout.dim_str.split())}]"


def name_of(layout: Any, names: dict[str, Any]) -> str | None:
    """The name of a layout among ``names``, a module's globals, or in a module named there (``components.Residual``).

    The first one's, as jaxtyping gives its types none; None where it goes by no name in either place.
    """
    spaces = [names, *(vars(value) for value in list(names.values()) if isinstance(value, ModuleType))]
    return next((name for space in spaces for name, value in list(space.items()) if value is layout), None)
