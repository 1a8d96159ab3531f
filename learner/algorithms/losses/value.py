"""The critic's loss, and its explained variance (pure torch)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from learner.algorithms.kl.estimators import cut


class ValueLoss(NamedTuple):
    """Per token, [N]: the loss (the only field with a gradient), and whether the clip is active."""

    loss: torch.Tensor
    clipped: torch.Tensor


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | None = None,
) -> ValueLoss:
    """Return max(l(v - R), l(clip(v, v_old - clip, v_old + clip) - R)) per token, with l(e) = e^2 / 2.

    PPO's clipped value loss as in OpenAI's baselines, verl, OpenRLHF and AReaL (clip 0.5; the factor 1/2 is included:
    slime omits it). clip None: l(v - R). Gradient: v - R, and 0 where the clip is active. `old_values` and `returns`
    are constants. Masked positions get loss 0 and pass no gradient.
    """
    v, target = cut(values, mask), cut(returns.detach(), mask)
    free = 0.5 * (v - target).square()
    if clip is None:
        return ValueLoss(free, torch.zeros_like(mask))
    old = cut(old_values.detach(), mask)
    bounded = 0.5 * (torch.clamp(v, old - clip, old + clip) - target).square()
    return ValueLoss(torch.maximum(free, bounded), mask & (bounded > free).detach())


class VarianceSums(NamedTuple):
    """Sums over tokens, 0-d float64 each, to be added over micro-batches and ranks.

    Count; returns R and their squares; errors R - v and their squares.
    """

    tokens: torch.Tensor
    returns: torch.Tensor
    return_squares: torch.Tensor
    errors: torch.Tensor
    error_squares: torch.Tensor


def variance_sums(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> VarianceSums:
    """Return the sums of one micro-batch, [N] each, where `mask` is True."""
    r = cut(returns.detach(), mask).double()
    e = r - cut(values.detach(), mask).double()
    return VarianceSums(mask.sum().double(), r.sum(), r.square().sum(), e.sum(), e.square().sum())


def explained_variance(sums: VarianceSums) -> float:
    """Return 1 - var(R - v) / var(R): 1 for a perfect critic, 0 for a constant one, below 0 for a harmful one.

    0 where returns do not vary, up to float64's rounding: there is no variance to explain.
    """
    n, r, rr = float(sums.tokens), float(sums.returns), float(sums.return_squares)
    e, ee = float(sums.errors), float(sums.error_squares)
    if n == 0:
        return 0.0
    variance = rr / n - (r / n) ** 2
    if variance <= 1e-12 * rr / n:
        return 0.0
    return 1.0 - (ee / n - (e / n) ** 2) / variance
