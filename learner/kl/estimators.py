"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (pure torch).

John Schulman, "Approximating KL divergence" (2020), with x = log reference - log policy:
k1 = -x (unbiased, any sign), k2 = x^2 / 2 (its gradient is that of the true KL, on policy) and
k3 = e^x - x - 1 (unbiased, never negative).
"""

from __future__ import annotations

from typing import Literal

import torch

LOG_RATIO_LIMIT = 20.0
"""e^20 = 5e8: beyond it a ratio says only that two policies have nothing in common, and would overflow."""


def kl_estimate(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, kind: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Estimate for each token, of the shape of `policy` and `reference` (log-probs); 0 where `mask` is False.

    Masked positions are cut off before anything is computed, so a NaN or infinity there reaches neither the value nor
    the gradient. x is clamped to +-20, where the gradient is 0.
    """
    x = torch.where(mask, reference - policy, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -x
    if kind == "k2":
        return 0.5 * x.square()
    # expm1 keeps the digits that e^x - 1 loses near 0, where policies usually are
    return torch.expm1(x) - x
