"""Tokens on one scale: mean 0 and variance 1 over the whole batch, however it is cut (pure torch)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.advantages.outcomes import SAME


def unchanged(vector: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return vector


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    total: Callable[[torch.Tensor], torch.Tensor] = unchanged,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    centre_only: bool = False,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) where `mask` holds, 0 elsewhere; of the shape and dtype of `values`.

    values       any shape and float dtype; NaN where masked does not matter. The result is a constant (no gradient)
    mask         bool, of that shape
    total        sums a float64 vector over all ranks, and over all micro-batches of a step; called twice, on every
                 rank, whatever the mask: moments of a micro-batch or of a rank alone would make the loss depend on the
                 cut
    unbiased     variance / (n - 1), as verl does (`masked_whiten`); OpenRLHF and AReaL divide by n
    centre_only  leaves the division out

    Moments are taken in float64, the variance about the mean and not as a difference of squares. No valid token, one,
    or values that are equal but for rounding: 0 (verl raises for fewer than two).
    """
    known = torch.where(mask, values, 0.0).detach().double()
    count, summed, squares = total(torch.stack([mask.sum().double(), known.sum(), known.square().sum()]))
    mean = summed / count.clamp(min=1)
    centred = torch.where(mask, known - mean, 0.0)
    (deviations,) = total(centred.square().sum().reshape(1))
    variance = deviations / (count - 1 if unbiased else count).clamp(min=1)
    # An absolute and a relative bound, as for the rewards of a group: rounding must not be blown up by 1 / epsilon.
    noise = SAME * (squares / count.clamp(min=1)).sqrt().clamp(min=1)
    scaled = centred if centre_only else centred / (variance + epsilon).sqrt()
    return torch.where(variance.sqrt() > noise, scaled, 0.0).to(values.dtype)
