"""The clipped surrogate and importance weights from log-probs of sampled tokens (pure torch)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from learner.kl import cut, log_ratio

__all__ = ["Surrogate", "clip_gain", "clipped_surrogate", "log_ratio", "plain", "weighted_sum"]


class Surrogate(NamedTuple):
    """What every policy loss gives of each token, [N]; 0 and False where masked.

    loss          to be minimised; the only one with a gradient
    ratio         to the proximal policy, or of the trajectory where the method compares those
    clipped       whether the bound on the ratio acted (verl's `pg_clipfrac`): clipped_low or clipped_high
    clipped_low   below the lower bound, where that acts: PPO's only for a negative advantage
    clipped_high  above the upper bound, where that acts: PPO's only for a positive advantage
    clipped_dual  whether the dual clip acted (verl's `pg_clipfrac_lower`)
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor


def clip_gain(
    ratio: torch.Tensor, gain: torch.Tensor, mask: torch.Tensor, *, low: float, high: float, dual: float | None = None
) -> Surrogate:
    """PPO's clip of `ratio` (finite, with gradient) under advantages `gain` (constants, 0 where masked).

    Raises ValueError for a dual clip that is not above 1: it would act where policies are equal.
    """
    if dual is not None and dual <= 1:
        raise ValueError(f"the dual clip bounds a ratio that has grown, so it must be above 1, not {dual}")
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - low, 1 + high))
    fixed = ratio.detach()
    below = mask & (gain < 0) & (fixed < 1 - low)
    above = mask & (gain > 0) & (fixed > 1 + high)
    beyond = torch.zeros_like(mask)
    if dual is not None:
        beyond = mask & (gain < 0) & (fixed > dual)
        loss = torch.where(beyond, -gain * dual, loss)
    return Surrogate(loss, cut(fixed, mask), below | above, below, above, beyond)


def plain(loss: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor) -> Surrogate:
    """A loss that clips nothing; `ratio` is reported only."""
    never = torch.zeros_like(mask)
    return Surrogate(cut(loss, mask), cut(ratio.detach(), mask), never, never, never, never)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for each token, to be minimised, with r = policy / old.

    PPO (arXiv 1707.06347, equation 7) with the two bounds apart (DAPO, arXiv 2503.14476). With `dual`, where A < 0 the
    loss is at most -dual A (arXiv 1912.09729; there 3). Gradient: -A r grad log policy, and 0 where a
    clip acts. `old` and `advantages` are constants. All [N]; masked positions get loss 0 and pass no gradient.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    return clip_gain(ratio, cut(advantages.detach(), mask), mask, low=low, high=high, dual=dual)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of values * weights where `mask` holds, as a scalar; masked values and weights may be NaN.

    With nothing to sum it is a 0 that still has a graph: every rank must run its backward pass.
    """
    return (cut(values, mask) * cut(weights, mask)).sum()
