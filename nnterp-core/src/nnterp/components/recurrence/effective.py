"""Effective attention: the weight of each token's value in each later token's output of a linear recurrence.

A recurrence that is linear in its values is a causal matrix ``M`` per head, ``outputs[q] = sum_k M[q, k] values[k]``
beside what a state from before contributes. Ali et al. 2024 (arXiv 2403.01590) write it out for Mamba, Dao and Gu 2024
(arXiv 2405.21060) for Mamba-2, Yang et al. 2024 (arXiv 2406.06484, 2412.06464) for the delta rule.
"""

import torch
from torch import Tensor


def causal(length: int, like: Tensor) -> Tensor:
    """Which (query, key) pairs are not from the future, ``[query, key]``, bool."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril()


def kept(decays: Tensor) -> Tensor:
    """How much of what token ``key`` wrote is left at token ``query``: ``[..., query, key]`` from ``[..., seq]`` logs.

    The product of the decays of the tokens behind ``key`` up to ``query``; zero where ``query`` is before ``key``, or
    a token between them keeps nothing (-inf).
    """
    ends = torch.isneginf(decays)
    total, span = decays.masked_fill(ends, 0).cumsum(-1), ends.cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    apart = span.unsqueeze(-1) != span.unsqueeze(-2)
    return between.masked_fill(apart | ~causal(decays.shape[-1], decays), float("-inf")).exp()


def state_space(queries: Tensor, keys: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
    """Mamba-2: ``C_q . B_k * exp(sum of decays) * beta_k``.

    ``queries`` and ``keys`` are ``[batch, seq, groups, state_dim]``, ``decays`` and ``betas`` ``[batch, seq, heads]``.
    """
    heads = decays.shape[2]
    scores = torch.einsum("bqgn,bkgn->bgqk", queries.float(), keys.float())
    scores = scores.repeat_interleave(heads // scores.shape[1], dim=1)
    return scores * kept(decays.float().transpose(1, 2)) * betas.float().transpose(1, 2).unsqueeze(2)


def selective_scan(queries: Tensor, keys: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
    """Mamba-1, per channel: ``sum_n C_q[n] B_k[n] exp(sum of decays[n]) * beta_k``.

    ``queries`` and ``keys`` are ``[batch, seq, state_dim]``, ``decays`` ``[batch, seq, channels, state_dim]``,
    ``betas`` ``[batch, seq, channels]``. One state dimension at a time, so no tensor is larger than the result.
    """
    total = 0.0
    for n in range(queries.shape[-1]):
        scores = queries[..., n].float().unsqueeze(2) * keys[..., n].float().unsqueeze(1)
        total = total + scores.unsqueeze(1) * kept(decays[..., n].float().transpose(1, 2))
    return total * betas.float().transpose(1, 2).unsqueeze(2)


def delta_rule(queries: Tensor, keys: Tensor, decays: Tensor, betas: Tensor, normed: bool) -> Tensor:
    """The gated delta rule: what each token writes is its value less what the state already holds for its key.

    With ``R[q, k] = q_q . k_k * kept`` and ``W[i, k] = beta_i k_i . k_k * kept`` for ``k < i``, the writes solve
    ``(1 + W) u = beta v``, so ``M = R (1 + W)^-1 beta``. ``queries`` and ``keys`` are ``[batch, seq, heads, key_dim]``,
    ``betas`` ``[batch, seq, heads]``, ``decays`` the same or, one per channel, like the keys. ``normed`` where the
    kernel norms queries and keys; it divides queries by ``sqrt(key_dim)`` in any case.
    """
    queries, keys, decays, betas = (value.float().transpose(1, 2) for value in (queries, keys, decays, betas))
    if normed:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * queries.shape[-1] ** -0.5
    if decays.dim() == betas.dim():
        left = kept(decays)
        reads, overlaps = (x @ keys.transpose(-1, -2) * left for x in (queries, keys))
    else:  # a decay per channel: one channel at a time
        reads = overlaps = torch.zeros(1, device=keys.device)
        for c in range(keys.shape[-1]):
            left = kept(decays[..., c]) * keys[..., c].unsqueeze(-2)
            reads, overlaps = reads + queries[..., c, None] * left, overlaps + keys[..., c, None] * left
    system = torch.eye(keys.shape[-2], device=keys.device) + (betas.unsqueeze(-1) * overlaps).tril(-1)
    solved = torch.linalg.solve_triangular(system, torch.diag_embed(betas), upper=False, unitriangular=True)
    return reads @ solved
