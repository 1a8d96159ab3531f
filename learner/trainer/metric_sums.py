"""Metrics of a step from the outputs of its losses, summed over micro-batches and ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from learner.algorithms.base import LossOutput
from learner.algorithms.losses.off_policy import WeightSums, effective_sample_size
from learner.algorithms.losses.value import VarianceSums, explained_variance

AllReduceScalars = Callable[[list[float], list[float]], tuple[list[float], list[float]]]
"""Element-wise sums and maxima over the ranks; collective."""
VARIANCE = ("return_mean", "return_square", "value_error", "value_error_square")
"""Names of the sums for the explained variance, which spans the batch: fields of `VarianceSums` but for the tokens."""


def summed(
    outputs: Sequence[LossOutput], num_tokens: int, num_trained: int, all_reduce: AllReduceScalars
) -> tuple[dict[str, float], int]:
    """Return the metrics, with the loss, and `num_trained` over all ranks; collective.

    num_tokens           number of this rank's tokens in `outputs`
    ess                  effective sample size as a share of the tokens, (sum w)^2 / (n sum w^2)
    explained_variance   1 - var(R - V) / var(R); 0 where returns do not vary
    """
    # Every rank has at least a dummy, so all ranks have the same names in the same order.
    totals = defaultdict[tuple[str, str], float](float)
    largest: dict[str, float] = {}
    for output in outputs:
        for key, value in scalars(output).items():
            totals[key] += float(value)
        for name, value in output.maxima.items():
            largest[name] = max(largest.get(name, -math.inf), float(value))
    (trained, tokens, *sums), maxima = all_reduce([num_trained, num_tokens, *totals.values()], list(largest.values()))
    totals.update(zip(totals, sums, strict=True))
    metrics = {"loss": totals["loss", ""]}
    metrics |= {name: total / tokens for (kind, name), total in totals.items() if kind == "sum"}
    metrics |= {
        name: total / totals["below", name]
        for (kind, name), total in totals.items()
        if kind == "above" and totals["below", name]
    }
    derive(metrics)
    return metrics | dict(zip(largest, maxima, strict=True)), int(trained)


def scalars(output: LossOutput) -> dict[tuple[str, str], torch.Tensor]:
    """Return what is added up, by kind and name; a ratio's numerator is `above`, its denominator `below`."""
    return {
        ("loss", ""): output.loss,
        **{("sum", name): value for name, value in output.sums.items()},
        **{("above", name): value[0] for name, value in output.ratios.items()},
        **{("below", name): value[1] for name, value in output.ratios.items()},
    }


def derive(metrics: dict[str, float]) -> None:
    """Replace sums over the whole batch by metrics derived from them; these do not depend on the scale."""
    square = metrics.pop("ratio_square", None)
    if square is not None:
        sums = (torch.tensor(x, dtype=torch.float64) for x in (metrics["ratio_mean"], square, 1.0))
        metrics["ess"] = effective_sample_size(WeightSums(*sums))
    if "return_square" in metrics:
        pieces = (1.0, metrics["return_mean"], *(metrics.pop(name) for name in VARIANCE[1:]))
        sums = (torch.tensor(x, dtype=torch.float64) for x in pieces)
        metrics["explained_variance"] = explained_variance(VarianceSums(*sums))
