"""The edits that the suite tries: the same function on a value served by nnterp and on the one in the bare model."""

import torch
from torch import Tensor


def noise(tensor: Tensor, seed: int = 0) -> Tensor:
    """Standard normal numbers of the shape and dtype of ``tensor``, the same for the same shape."""
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(tensor.device, tensor.dtype)


def moved(value: Tensor) -> Tensor:
    """Half of the value and as much noise."""
    return 0.5 * value + 0.5 * noise(value)


def repatterned(value: Tensor) -> Tensor:
    """Another pattern with the same support, its rows summing to what they did."""
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device, value.dtype)
    weights = weights * (value > 0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6) * value.sum(-1, keepdim=True)


def edit_of(value: str):
    """The edit to try on a value, by its support name."""
    return repatterned if value.endswith("attention_probabilities") else moved


def spot(dims: tuple[str, ...]) -> tuple:
    """The index of the last token of the last row, in a value with these axes."""
    return tuple(-1 if axis in ("batch", "seq", "query", "tokens") else slice(None) for axis in dims)


def only_at(index: tuple, edit):
    """``edit`` at ``index`` alone."""

    def apply(value: Tensor) -> Tensor:
        edited = value.clone()
        edited[index] = edit(value)[index]
        return edited

    return apply


def rows(value: Tensor, dims: tuple[str, ...], batch: int, row: int) -> Tensor:
    """One row of a batched value, its batch axis kept."""
    return value.reshape(batch, -1, *value.shape[1:])[row] if dims[0] == "tokens" else value[row : row + 1]


def only_row(row: int, batch: int, dims: tuple[str, ...], edit):
    """``edit`` of one row taken alone, the others as they are."""

    def apply(value: Tensor) -> Tensor:
        parts = [rows(value, dims, batch, i) for i in range(batch)]
        return torch.cat([edit(part) if i == row else part for i, part in enumerate(parts)])

    return apply
