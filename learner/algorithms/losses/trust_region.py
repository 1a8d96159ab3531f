"""Trust regions in probabilities instead of ratios (pure torch): a clip on ratios constrains rare tokens, whose
probability hardly moves, and lets likely ones move far. And a one-sided region: what is good must not become unlikely.
"""

from __future__ import annotations

from typing import Literal

import torch

from learner.algorithms.kl.estimators import cut, log_ratio
from learner.algorithms.losses.policy import Surrogate
from learner.algorithms.losses.segments import segment_mean

Divergence = Literal["tv", "kl"]
_TINY = 1e-8
"""Added to probabilities before the logarithm, as in verl."""


def moved_too_far(
    logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, *, low: float, high: float, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([N] bool, [N] bool): tokens whose probability has fallen, or risen, by a divergence above `low`, or
    `high`.

    With p the policy's and q the old policy's probability of the sampled token, the divergence is that of the two
    distributions over "this token" and "another":

    tv  |p - q|
    kl  KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), in nats
    """
    gap = log_ratio(logprobs.detach(), old.detach(), mask)
    p, q = cut(logprobs.detach(), mask).exp(), cut(old.detach(), mask).exp()
    if divergence == "tv":
        size = (p - q).abs()
    elif divergence == "kl":
        others, others_before = (1 - p).clamp(min=0), (1 - q).clamp(min=0)
        size = -q * gap + others_before * torch.log((others_before + _TINY) / (others + _TINY))
    else:
        raise ValueError(f"unknown divergence {divergence!r}; known: tv, kl")
    return mask & (p < q) & (size > low), mask & (p > q) & (size > high)


def dppo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
    divergence: Divergence = "tv",
    symmetric: bool = False,
    cap: float = torch.inf,
) -> Surrogate:
    """Return -A min(r, cap) per token inside the trust region, 0 outside, with r = policy / old.

    DPPO (arXiv 2602.04879): outside are tokens whose probability has already moved too far (`moved_too_far`) in the
    direction of the advantage: risen where A > 0, fallen where A < 0. With `symmetric`, in either direction (IPO of
    prime-rl). Gradient: -A min(r, cap) grad log policy inside, also where the cap is active: verl's `dppo_tv` and
    `dppo_kl` (cap 20, section 5.4; their value has another factor log policy) and, without a cap, prime-rl's default
    loss and its IPO in value and gradient. Log-ratios are clamped to +-20 (no gradient beyond). All [N].
    """
    gap = log_ratio(logprobs, old.detach(), mask)
    fixed, gain = gap.detach(), cut(advantages.detach(), mask)
    below, above = moved_too_far(logprobs, old, mask, low=low, high=high, divergence=divergence)
    if not symmetric:
        below, above = below & (gain < 0), above & (gain > 0)
    inside = mask & ~(below | above)
    capped = inside & (fixed.exp() > cap)
    loss = -gain * fixed.exp().clamp(max=cap) * (gap - fixed).exp()
    return Surrogate(torch.where(inside, loss, 0.0), cut(fixed.exp(), mask), below | above, below, above, capped)


def preserve(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    unit: torch.Tensor,
    mask: torch.Tensor,
    *,
    threshold: float = 0.0,
    positive_only: bool = True,
) -> torch.Tensor:
    """Return max(0, d) per token, with d = log(old / policy), in units that have become less likely; 0 elsewhere.

    unit [N] int64 is the number of each token's token, turn or trajectory. Only tokens with A > 0 count (A >= 0 unless
    `positive_only`); a unit has become less likely if the mean of d over them exceeds `threshold`. Gradient:
    -grad log policy of each fallen token of such a unit. LLDS (arXiv 2512.04220) with threshold 0, where the sum of d
    decides; the search agents' SAPO (arXiv 2603.10069) with units of one token and threshold -log(tau), tau <= 1. d is
    clamped to +-20 (no gradient beyond).
    """
    fallen = -log_ratio(logprobs, old.detach(), mask)
    gain = cut(advantages.detach(), mask)
    counted = mask & ((gain > 0) if positive_only else (gain >= 0))
    active = counted & (segment_mean(fallen.detach(), unit, counted) > threshold) & (fallen.detach() > 0)
    return torch.where(active, fallen, 0.0)
