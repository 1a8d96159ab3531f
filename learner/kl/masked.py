"""What masks and log-ratios mean to every loss and divergence (pure torch).

A masked position may hold anything, NaN included. `cut` replaces it before anything is computed from it: a product
with a mask would leak NaN into the value, and a mask applied last would leak it into the gradient.
"""

from __future__ import annotations

import torch

CAP = 10.0
"""Greatest value of an exponential estimate of a divergence at one token, and greatest importance weight on it: e^20
at one token would be the whole gradient of a batch. verl, OpenRLHF and Search-R1 cap k3 at 10 likewise."""

LOG_RATIO_LIMIT = 20.0
"""e^20 = 5e8: beyond it a ratio says only that two policies have nothing in common, and would overflow."""


def require_mask(mask: torch.Tensor) -> None:
    """Raises TypeError unless `mask` is bool: as an index or a condition an int or float mask means something else."""
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is of dtype torch.bool, this one is {mask.dtype}")


def cut(values: torch.Tensor, mask: torch.Tensor, instead: float = 0.0) -> torch.Tensor:
    """`values` where `mask` holds, `instead` elsewhere; no gradient reaches what was cut.

    `mask` is bool and has the shape of `values`; raises TypeError or ValueError otherwise.
    """
    require_mask(mask)
    if values.shape != mask.shape:
        raise ValueError(f"values of shape {tuple(values.shape)} do not fit a mask of shape {tuple(mask.shape)}")
    return torch.where(mask, values, instead)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """`log_ratio` within +-20; the gradient is 0 beyond."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def capped(estimate: torch.Tensor) -> torch.Tensor:
    """`estimate` up to `CAP`; the gradient is 0 beyond."""
    return estimate.clamp(max=CAP)


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log(policy / old) clamped to +-20 (gradient 0 beyond), 0 where `mask` is False whatever stands there."""
    return clamped(cut(logprobs - old, mask))
