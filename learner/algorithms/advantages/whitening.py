"""Tokens on one scale: mean 0 and variance 1 over the whole batch, however it is cut; and running moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from learner.algorithms.advantages.outcomes import SAME, Float64


def unchanged(vector: torch.Tensor) -> torch.Tensor:
    """Return the sum over one rank."""
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


class RunningMoments:
    """Count, mean and sum of squared distances from it, in float64, one value or one set at a time.

    Welford's update in the form for sets (Chan, Golub, LeVeque 1979): no sum of squares that loses its digits when the
    mean is large. Rank 0 keeps one and feeds it the whole batch; or each rank keeps one and they are merged.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def update(self, values: Float64) -> None:
        """Take in values of any shape. Raises ValueError for one that is not finite: it would stay for ever."""
        given = np.asarray(values, np.float64).ravel()
        if not np.isfinite(given).all():
            raise ValueError("a value is not finite")
        if len(given):
            mean = float(given.mean())
            self._add(len(given), mean, float(np.square(given - mean).sum()))

    def merge(self, other: RunningMoments) -> None:
        """Take in all that `other` has seen."""
        if other.count:
            self._add(other.count, other.mean, other._squares)

    def std(self, ddof: int = 0) -> float:
        """Return the deviation, its variance divided by count - ddof; 0 when that is not above 0."""
        return math.sqrt(self._squares / (self.count - ddof)) if self.count > ddof else 0.0

    def normalize(self, values: Float64, *, centre: bool = True, ddof: int = 0, epsilon: float = 1e-8) -> Float64:
        """(values - mean) / (std + epsilon), of the shape of `values`, float64; without centre only the division.

        As long as all that was seen was one value but for rounding, nothing is divided.
        """
        std = self.std(ddof)
        scale = std + epsilon if std > SAME * max(1.0, abs(self.mean)) else 1.0
        return (np.asarray(values, np.float64) - (self.mean if centre else 0.0)) / scale

    def state(self) -> dict[str, float]:
        """Return numbers that JSON carries exactly."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load(self, state: dict[str, float]) -> None:
        """Go on from `state()`. Raises KeyError when a number is missing."""
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])

    def _add(self, count: int, mean: float, squares: float) -> None:
        total = self.count + count
        step = mean - self.mean
        self._squares += squares + step * step * self.count * count / total
        self.mean += step * count / total
        self.count = total
