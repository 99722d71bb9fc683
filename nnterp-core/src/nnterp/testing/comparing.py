"""How two tensors are compared: to the last bits of their dtype, never by a tolerance chosen to pass."""

import torch
from torch import Tensor

#: Rounding errors granted to two ways of computing the same tensor, in units of the dtype's precision at the
#: tensor's scale.
ULPS = 8
#: The same where the difference has gone through the rest of the model.
ULPS_AFTER_MODEL = 64
#: Beyond this a score is a mask's, not a number.
MASKED = 1e30


def assert_close(actual: Tensor, expected: Tensor, ulps: float = ULPS, precision: torch.dtype | None = None) -> None:
    """``actual`` is ``expected`` up to ``ulps`` of rounding (in ``precision``, the tensors' own by default)."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    precision = precision or expected.dtype
    actual, expected = actual.detach(), expected.detach()
    masked = expected.abs() > MASKED
    assert torch.equal(actual.abs() > MASKED, masked), "other entries are masked"
    actual, expected = actual.double().masked_fill(masked, 0), expected.double().masked_fill(masked, 0)
    allowed = ulps * torch.finfo(precision).eps * expected.abs().max().item()
    off = (actual - expected).abs().max().item()
    assert off <= allowed, f"off by {off:.3g}, {ulps} ulps allow {allowed:.3g}"


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Bit by bit."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(actual, expected), f"off by {(actual.double() - expected.double()).abs().max().item():.3g}"


def assert_differs(actual: Tensor, clean: Tensor) -> None:
    """By more than rounding can explain."""
    assert actual.shape == clean.shape
    scale = clean.detach().double().abs().max().item()
    off = (actual.detach().double() - clean.detach().double()).abs().max().item()
    assert off > 1e3 * torch.finfo(clean.dtype).eps * scale, f"the edit changed nothing beyond rounding ({off:.3g})"
