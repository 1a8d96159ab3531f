"""Whitening over the whole batch (mean 0, variance 1, independent of micro-batches and ranks); running moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from learner.algorithms.advantages.outcomes import SAME, Float64


def unchanged(vector: torch.Tensor) -> torch.Tensor:
    """Return `vector`: the sum over a single rank."""
    return vector


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = unchanged,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    centre_only: bool = False,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) where `mask` holds, 0 elsewhere; of the shape and dtype of `values`.

    values       any shape and float dtype; NaN at masked positions has no effect. The result is a constant (no
                 gradient)
    mask         bool, of that shape
    all_reduce   sums a float64 vector over all ranks and all micro-batches of a step; called twice on every rank,
                 whatever the mask. Moments of a single micro-batch or rank would make the loss depend on how the batch
                 is split
    unbiased     variance / (n - 1), as verl does (`masked_whiten`); OpenRLHF and AReaL divide by n
    centre_only  omits the division

    Moments are computed in float64, the variance about the mean, not as a difference of squares. With no valid token, a
    single one, or values that are equal up to rounding, the result is 0 (verl raises for fewer than two).
    """
    known = torch.where(mask, values, 0.0).detach().double()
    count, summed, squares = all_reduce(torch.stack([mask.sum().double(), known.sum(), known.square().sum()]))
    mean = summed / count.clamp(min=1)
    centred = torch.where(mask, known - mean, 0.0)
    (deviations,) = all_reduce(centred.square().sum().reshape(1))
    variance = deviations / (count - 1 if unbiased else count).clamp(min=1)
    # An absolute and a relative bound, as for the rewards of a group: 1 / epsilon must not amplify rounding.
    noise = SAME * (squares / count.clamp(min=1)).sqrt().clamp(min=1)
    scaled = centred if centre_only else centred / (variance + epsilon).sqrt()
    return torch.where(variance.sqrt() > noise, scaled, 0.0).to(values.dtype)


class RunningMoments:
    """Count, mean and sum of squared distances from it, in float64, one value or one set at a time.

    Welford's update for sets (Chan, Golub, LeVeque 1979): no sum of squares that loses its digits when the mean is
    large. Rank 0 keeps one instance and feeds it the whole batch; or each rank keeps one and they are merged.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def update(self, values: Float64) -> None:
        """Add values of any shape. Raises ValueError for a non-finite value: it would stay in the moments for ever."""
        given = np.asarray(values, np.float64).ravel()
        if not np.isfinite(given).all():
            raise ValueError("a value is not finite")
        if len(given):
            mean = float(given.mean())
            self._add(len(given), mean, float(np.square(given - mean).sum()))

    def merge(self, other: RunningMoments) -> None:
        """Add everything that `other` has seen."""
        if other.count:
            self._add(other.count, other.mean, other._squares)

    def std(self, ddof: int = 0) -> float:
        """Return the deviation, with the variance divided by count - ddof; 0 if that is not positive."""
        return math.sqrt(self._squares / (self.count - ddof)) if self.count > ddof else 0.0

    def normalize(self, values: Float64, *, centre: bool = True, ddof: int = 0, epsilon: float = 1e-8) -> Float64:
        """Return (values - mean) / (std + epsilon), float64, of the shape of `values`; centre=False only divides.

        Does not divide while all values seen are equal up to rounding.
        """
        std = self.std(ddof)
        scale = std + epsilon if std > SAME * max(1.0, abs(self.mean)) else 1.0
        return (np.asarray(values, np.float64) - (self.mean if centre else 0.0)) / scale

    def state(self) -> dict[str, float]:
        """Return the state as numbers that JSON represents exactly."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load(self, state: dict[str, float]) -> None:
        """Restore a `state()`. Raises KeyError if a number is missing."""
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])

    def _add(self, count: int, mean: float, squares: float) -> None:
        total = self.count + count
        step = mean - self.mean
        self._squares += squares + step * step * self.count * count / total
        self.mean += step * count / total
        self.count = total
