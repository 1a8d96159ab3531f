"""Intervals and paired tests against slow, independent computations."""

from __future__ import annotations

import itertools
import math
import random
import statistics as stdlib

import numpy as np
import pytest

from foray.evaluation.statistics import interval, paired_test


def slow_bootstrap(samples: list[list[float]], draws: int, seed: int) -> tuple[float, float]:
    """Resample each data set question by question."""
    rng = random.Random(seed)
    means = sorted(stdlib.fmean(stdlib.fmean(rng.choices(s, k=len(s))) for s in samples) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


@pytest.mark.parametrize("values", [[0.0, 1.0] * 20 + [1.0] * 10, [i / 37 % 1 for i in range(60)], [1.0, 0.0, 0.5]])
def test_an_interval_is_that_of_a_bootstrap_question_by_question(values: list[float]) -> None:
    found = interval({"a": values})
    low, high = slow_bootstrap([values], 4000, 1)
    assert found.mean == pytest.approx(stdlib.fmean(values)) and found.n == len(values)
    assert found.low == pytest.approx(low, abs=0.03) and found.high == pytest.approx(high, abs=0.03)


def test_several_data_sets_are_resampled_each_by_itself_and_weigh_the_same() -> None:
    rng = random.Random(5)
    samples = [[float(rng.random() < 0.2) for _ in range(400)], [float(rng.random() < 0.9) for _ in range(30)]]
    found = interval({"large": samples[0], "small": samples[1]})
    low, high = slow_bootstrap(samples, 4000, 2)
    assert found.mean == pytest.approx((stdlib.fmean(samples[0]) + stdlib.fmean(samples[1])) / 2)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))


@pytest.mark.parametrize(("n", "low"), [(15, 0.796), (100, 0.963)])
def test_an_interval_of_equal_answers_is_wilsons(n: int, low: float) -> None:
    right, wrong = interval({"a": [1.0] * n}), interval({"a": [0.0] * n})
    assert (right.mean, right.high, wrong.mean, wrong.low) == (1.0, 1.0, 0.0, 0.0)
    assert right.low == pytest.approx(low, abs=5e-4) and wrong.high == pytest.approx(1 - right.low)
    both = interval({"a": [1.0] * n, "b": [1.0] * n})
    assert both.low == pytest.approx(interval({"a": [1.0] * 2 * n}).low) and both.high == 1.0
    half = interval({"a": [0.5] * n})
    assert half.low == half.high == 0.5, "no share of right answers"


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    samples = (rng.random(80) < 0.4 for _ in range(300))
    covered = [
        e.low <= 0.4 <= e.high for e in (interval({"a": s.astype(float).tolist()}, resamples=400) for s in samples)
    ]
    assert 0.90 <= stdlib.fmean(covered) <= 0.99


def test_the_p_value_is_the_share_of_sign_patterns_that_are_as_extreme() -> None:
    differences = [0.5, 1.0, -0.25, 1.0, 0.0, 1.0, -0.5, 1.0, 0.75]
    observed = abs(sum(differences))
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))
    extreme = sum(abs(sum(s * d for s, d in zip(p, differences, strict=True))) >= observed - 1e-9 for p in patterns)
    found = paired_test({"a": [0.0] * 9}, {"a": differences}, resamples=40_000)
    assert found.p_value == pytest.approx(extreme / len(patterns), abs=0.01)
    assert found.difference == pytest.approx(stdlib.fmean(differences)) and found.n == 9


def test_for_right_and_wrong_answers_it_is_mcnemars_exact_test() -> None:
    gained, lost, same = 14, 4, 60
    first = [0.0] * gained + [1.0] * lost + [1.0] * same
    second = [1.0] * gained + [0.0] * lost + [1.0] * same
    n = gained + lost
    exact = min(1.0, 2 * sum(math.comb(n, k) for k in range(gained, n + 1)) / 2**n)
    found = paired_test({"a": first}, {"a": second}, resamples=40_000)
    assert found.p_value == pytest.approx(exact, abs=0.006)
    low, high = slow_bootstrap([[b - a for a, b in zip(first, second, strict=True)]], 4000, 1)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))


def test_equal_systems_have_p_1_and_the_test_is_symmetric() -> None:
    values = [0.1 * (i % 7) for i in range(50)]
    same = paired_test({"a": values}, {"a": values})
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    other = [v + 0.3 * (i % 3 == 0) for i, v in enumerate(values)]
    forth, back = (paired_test({"a": x}, {"a": y}) for x, y in ((values, other), (other, values)))
    assert forth.difference == pytest.approx(-back.difference) and forth.p_value == back.p_value < 0.01


def test_under_the_null_small_p_values_are_rare() -> None:
    rng = np.random.default_rng(0)
    found = [
        paired_test({"a": rng.random(20).tolist()}, {"a": rng.random(20).tolist()}, resamples=200).p_value
        for _ in range(200)
    ]
    assert stdlib.fmean(p <= 0.05 for p in found) == pytest.approx(0.05, abs=0.04) and min(found) >= 1 / 201


def test_results_depend_on_the_seed_alone() -> None:
    values = {"a": [0.0, 1.0, 1.0, 0.5] * 9}
    assert interval(values, seed=4) == interval(values, seed=4)
    assert interval(values, seed=4, resamples=50) != interval(values, seed=5, resamples=50)


def test_nothing_to_measure_is_no_number_and_unequal_questions_are_refused() -> None:
    assert math.isnan(interval({"a": []}).mean) and math.isnan(paired_test({}, {}).p_value)
    assert interval({"a": [], "b": [1.0]}).n == 1
    with pytest.raises(ValueError, match="same questions"):
        paired_test({"a": [1.0]}, {"a": [1.0, 0.0]})
