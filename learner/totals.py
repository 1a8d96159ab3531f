"""Sums over micro-batches and ranks, and the metrics made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from learner.algorithms.base import LossOutput
from learner.losses import VarianceSums, WeightSums, effective_sample_size, explained_variance


@dataclass
class Totals:
    """What `LossOutput`s of one pass add up to. The order of names is that of their first occurrence."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        """One micro-batch more."""
        self.loss += float(output.loss.detach())
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, (above, below) in output.ratios.items():
            before = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = (before[0] + float(above), before[1] + float(below))
        for name, value in output.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def sums_list(self) -> list[float]:
        """Everything that is added up over the ranks, as `report` wants it back."""
        return [self.loss, *self.sums.values(), *(x for pair in self.ratios.values() for x in pair)]

    def report(self, sums: list[float], maxima: list[float], num_tokens: int) -> dict[str, float]:
        """Metrics by name, from the numbers of all ranks.

        ess                 effective sample size as a share of the tokens, (sum w)^2 / (n sum w^2)
        explained_variance  1 - var(R - V) / var(R); 0 where returns do not vary
        """
        loss, *rest = sums
        count = len(self.sums)
        found = {"loss": loss, **{name: rest[i] / num_tokens for i, name in enumerate(self.sums)}}
        for i, name in enumerate(self.ratios):
            above, below = rest[count + 2 * i : count + 2 * i + 2]
            if below:
                found[name] = above / below
        _derive(found)
        return found | dict(zip(self.maxima, maxima, strict=True))


def _derive(found: dict[str, float]) -> None:
    """What is made of sums over the whole batch takes their place; both do not mind that these are means."""
    square = found.pop("ratio_square", None)
    if square is not None:
        sums = (torch.tensor(x, dtype=torch.float64) for x in (found["ratio_mean"], square, 1.0))
        found["ess"] = effective_sample_size(WeightSums(*sums))
    if "return_square" in found:
        names = ("return_square", "value_error", "value_error_square")
        pieces = (1.0, found["return_mean"], *(found.pop(name) for name in names))
        sums = (torch.tensor(x, dtype=torch.float64) for x in pieces)
        found["explained_variance"] = explained_variance(VarianceSums(*sums))
