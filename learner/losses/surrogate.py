"""The clipped surrogate and importance weights from log-probs of sampled tokens (pure torch)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from learner.kl import LOG_RATIO_LIMIT


class Surrogate(NamedTuple):
    """Of each token: its loss, its ratio to the proximal policy (0 where masked), and whether that was clipped."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log(policy / old) clamped to +-20 (gradient 0 beyond), 0 where `mask` is False whatever stands there."""
    return torch.where(mask, logprobs - old, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for each token, to be minimised, with r = policy / old.

    PPO (arXiv 1707.06347, equation 7) with the two bounds apart (DAPO, arXiv 2503.14476). `old` and `advantages` are
    constants. All of one shape; masked positions get loss 0 and pass no gradient.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    gain = torch.where(mask, advantages.detach(), 0.0)
    free, bounded = -gain * ratio, -gain * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bounded), torch.where(mask, ratio.detach(), 0.0), bounded > free)


def importance_weight(old: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, cap: float) -> torch.Tensor:
    """min(old / behaviour, cap) for each token, a constant: how much the sampler under- or overdrew it.

    Truncated importance sampling of decoupled PPO (AReaL, arXiv 2505.24298, equation 5); 1 where masked.
    """
    return log_ratio(old, behaviour, mask).exp().clamp(max=cap).detach()


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of values * weights where `mask` holds, as a scalar; masked values may be NaN."""
    return (torch.where(mask, values, 0.0) * weights).sum()
