"""Confidence intervals and paired tests over questions. Pure; every function takes its seed.

The unit is the question: several episodes of one question are averaged first, because they are not independent.

    interval  percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3
              If every question has 0, or every one 1, all resamples are equal. Then: score interval of Wilson, Probable
              Inference, the Law of Succession, and Statistical Inference (JASA 1927), of which one end is 0 or 1
    paired difference between two systems on the same questions:
      interval  percentile bootstrap over questions, as in Koehn, Statistical Significance Tests for Machine Translation
                Evaluation (EMNLP 2004)
      p-value   sign-flip randomisation test: Noreen, Computer-Intensive Methods for Testing Hypotheses (1989), with
                p = (1 + b) / (1 + m) of Phipson and Smyth, Permutation P-values Should Never Be Zero (2010)

A resample of n questions is drawn as counts of the distinct values: a multinomial draw has the same distribution and is
much cheaper for metrics with few values. The mean over several data sets resamples each data set by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
LEVEL = 0.95
_Z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
_TIE = 1e-12
"""Differences of sums below this, relative to the largest sum, are rounding."""

Values = Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, over `n` questions. Without a question all are NaN."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedTest:
    """The mean difference (second minus first) over `n` common questions, its interval, and the two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float
    n: int


def interval(samples: Mapping[str, Values], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Return the mean over data sets of the mean of each (macro average), with its bootstrap interval.

    samples  data set -> one value per question; empty ones are left out
    """
    filled = {name: np.asarray(values, float) for name, values in sorted(samples.items()) if len(values)}
    if not filled:
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    means = _bootstrap(list(filled.values()), np.random.default_rng(seed), resamples)
    low, high = _tails(means)
    mean = float(np.mean([values.mean() for values in filled.values()]))
    if mean in (0.0, 1.0) and low == high:
        # the mean over data sets has the variance of n questions in one
        n = len(filled) ** 2 / sum(1 / len(values) for values in filled.values())
        low, high = (0.0, _Z2 / (n + _Z2)) if mean == 0.0 else (n / (n + _Z2), 1.0)
    return Estimate(mean, low, high, sum(map(len, filled.values())))


def paired_test(
    first: Mapping[str, Values], second: Mapping[str, Values], *, seed: int = 0, resamples: int = RESAMPLES
) -> PairedTest:
    """Compare two systems on the same questions: data set -> values in the same order of questions.

    Raises ValueError if the data sets or their sizes differ.
    """
    if {name: len(v) for name, v in first.items()} != {name: len(v) for name, v in second.items()}:
        raise ValueError("a paired test needs the same questions on both sides")
    names = sorted(name for name in first if len(first[name]))
    if not names:
        return PairedTest(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    differences = [np.asarray(second[name], float) - np.asarray(first[name], float) for name in names]
    random = np.random.default_rng(seed)
    low, high = _tails(_bootstrap(differences, random, resamples))
    observed = float(np.mean([d.mean() for d in differences]))
    flipped = np.mean([_flip(d, random, resamples) for d in differences], axis=0)
    # sums of the same numbers in another order differ in the last digits
    largest = float(np.mean([np.abs(d).mean() for d in differences]))
    extreme = int(np.count_nonzero(np.abs(flipped) >= abs(observed) - _TIE * largest))
    return PairedTest(observed, low, high, (1 + extreme) / (1 + resamples), sum(map(len, differences)))


def _bootstrap(
    samples: Sequence[npt.NDArray[np.float64]], random: np.random.Generator, resamples: int
) -> npt.NDArray[np.float64]:
    """Return [resamples] float64: the mean over `samples` of the mean of a resample of each."""
    total = np.zeros(resamples)
    for values in samples:
        distinct, counts = np.unique(values, return_counts=True)
        drawn = random.multinomial(len(values), counts / len(values), size=resamples)
        total += drawn @ distinct / len(values)
    return total / len(samples)


def _flip(differences: npt.NDArray[np.float64], random: np.random.Generator, resamples: int) -> npt.NDArray[np.float64]:
    """Return [resamples] float64: the mean of the differences with random signs."""
    sizes, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    positive = random.binomial(counts, 0.5, size=(resamples, len(counts)))
    signed: npt.NDArray[np.float64] = (2 * positive - counts) @ sizes / len(differences)
    return signed


def _tails(means: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
