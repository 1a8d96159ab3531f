"""Trust regions in probabilities instead of ratios (pure torch): a clip on ratios constrains rare tokens, whose
probability hardly moves, and lets likely ones move far.
"""

from __future__ import annotations

from typing import Literal

import torch

from learner.algorithms.kl import cut, log_ratio
from learner.algorithms.losses.policy import Surrogate

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
