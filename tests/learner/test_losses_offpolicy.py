"""Corrections for tokens of another policy: slow loops in plain Python, bounds computed manually, sums over ranks."""

from __future__ import annotations

import math
from itertools import groupby
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.losses.off_policy import (
    WeightSums,
    at_level,
    effective_sample_size,
    keep_mask,
    masked,
    normalised,
    opsm,
    truncated,
    veto,
    weight_sums,
)
from learner.algorithms.losses.policy import log_ratio, proximal_interpolated

LEVELS = ("token", "sequence", "geometric")


class Tokens(NamedTuple):
    """A micro-batch of log-weights, [N] each; NaN where masked."""

    log_weight: torch.Tensor
    trajectory: torch.Tensor
    mask: torch.Tensor


@st.composite
def tokens(draw) -> Tokens:
    spans = draw(
        st.lists(
            st.tuples(
                st.integers(-9, 9),
                st.lists(st.tuples(st.floats(-25, 25) | st.floats(-1, 1), st.booleans()), min_size=1, max_size=6),
            ),
            unique_by=lambda span: span[0],
            min_size=1,
            max_size=4,
        )
    )
    flat = [(x if keep else math.nan, number, keep) for number, span in spans for x, keep in span]
    values, numbers, mask = zip(*flat, strict=True)
    return Tokens(torch.tensor(values, dtype=torch.float64), torch.tensor(numbers), torch.tensor(mask))


def slow_weights(given: Tokens, level: str) -> list[float]:
    """w of each token at the level; NaN where masked."""
    weights = [math.nan] * len(given.mask)
    for _, run in groupby(range(len(weights)), key=lambda i: int(given.trajectory[i])):
        kept = [i for i in run if given.mask[i]]
        logs = [min(max(float(given.log_weight[i]), -20.0), 20.0) for i in kept]
        for i, own in zip(kept, logs, strict=True):
            x = {"token": own, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level]
            weights[i] = math.exp(min(max(x, -20.0), 20.0))
    return weights


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(case=tokens())
def test_truncated_masked_and_kept_are_those_of_a_slow_loop(level, case):
    low, high = 0.5, 2.0
    weights = slow_weights(case, level)
    clipped = [0.0 if math.isnan(w) else min(max(w, low), high) for w in weights]
    banded = [w if low <= w <= high else 0.0 for w in weights]
    torch.testing.assert_close(truncated(*case, level=level, low=low, high=high).tolist(), clipped)
    torch.testing.assert_close(masked(*case, level=level, low=low, high=high).tolist(), banded)
    assert keep_mask(*case, level=level, low=low, high=high).tolist() == [low <= w <= high for w in weights]


@settings(max_examples=60, deadline=None)
@given(case=tokens())
def test_max_and_veto_judge_a_trajectory_by_its_worst_token(case):
    weights = slow_weights(case, "token")
    by_max, by_veto = [False] * len(weights), [False] * len(weights)
    for _, run in groupby(range(len(weights)), key=lambda i: int(case.trajectory[i])):
        kept = [i for i in run if case.mask[i]]
        for i in kept:
            by_max[i] = max(abs(math.log(weights[j])) for j in kept) <= math.log(3)
            by_veto[i] = min(weights[j] for j in kept) >= 1e-4
    assert keep_mask(*case, level="max", low=1 / 3, high=3.0).tolist() == by_max
    assert veto(*case, threshold=1e-4).tolist() == by_veto


def test_levels_by_hand():
    logs = torch.log(torch.tensor([2.0, 0.5, 4.0, 3.0], dtype=torch.float64))
    trajectory, mask = torch.tensor([8, 8, 8, -2]), torch.ones(4, dtype=torch.bool)
    assert at_level(logs, trajectory, mask, "token").exp().tolist() == pytest.approx([2, 0.5, 4, 3])
    assert at_level(logs, trajectory, mask, "sequence").exp().tolist() == pytest.approx([4, 4, 4, 3])
    assert at_level(logs, trajectory, mask, "geometric").exp().tolist() == pytest.approx([4 ** (1 / 3)] * 3 + [3])


def test_one_huge_token_does_not_overflow_its_trajectory():
    logs = torch.tensor([1000.0, math.inf, 20.0, -math.inf])
    trajectory, mask = torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)
    for level in LEVELS:
        weight = at_level(logs, trajectory, mask, level).exp()
        assert torch.isfinite(weight).all()
    assert at_level(logs, trajectory, mask, "sequence").tolist() == [20.0, 20.0, 20.0, -20.0]


def test_bounds_are_on_proximal_over_behaviour():
    """verl's k1 option with bounds 0.5 and 4 bounds the inverse: it would keep the second and drop the first."""
    weight = torch.tensor([3.0, 0.3])
    old, behaviour = torch.log(weight * 0.1), torch.log(torch.tensor([0.1, 0.1]))
    mask = torch.tensor([True, True])
    logs = log_ratio(old, behaviour, mask)
    kept = keep_mask(logs, torch.tensor([0, 1]), mask, level="sequence", low=0.5, high=4.0)
    assert kept.tolist() == [True, False]


def test_a_weight_on_a_bound_is_kept():
    logs, mask = torch.zeros(1), torch.tensor([True])
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        assert keep_mask(logs, torch.tensor([0]), mask, level="token", low=low, high=high).all()
        assert masked(logs, torch.tensor([0]), mask, level="token", low=low, high=high).item() == 1


def test_corrections_are_constants():
    logs, mask = torch.zeros(2, requires_grad=True), torch.tensor([True, True])
    trajectory = torch.tensor([0, 0])
    for level in LEVELS:
        assert not truncated(logs, trajectory, mask, level=level, high=2.0).requires_grad
        assert not masked(logs, trajectory, mask, level=level, low=0.5, high=2.0).requires_grad
    assert not normalised(logs + 1, mask, weight_sums(logs + 1, trajectory, mask, level="token")).requires_grad
    assert not proximal_interpolated(logs, logs, torch.tensor([1, 1]), mask).requires_grad


def test_nonsense_is_refused():
    case = Tokens(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor([True]))
    with pytest.raises(ValueError, match="bounds"):
        truncated(*case, level="token", low=2.0, high=1.0)
    with pytest.raises(ValueError, match="bounds"):
        masked(*case, level="token", low=2.0, high=1.0)
    with pytest.raises(ValueError, match="bounds"):
        keep_mask(*case, level="token", low=-1.0, high=1.0)
    with pytest.raises(ValueError, match="level"):
        at_level(*case, "word")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.bool"):
        masked(*case._replace(mask=torch.ones(1)), level="token", low=0.5, high=2.0)
    with pytest.raises(TypeError, match=r"torch\.bool"):
        weight_sums(torch.ones(1), torch.zeros(1), torch.ones(1), level="token")


@settings(max_examples=40, deadline=None)
@given(case=tokens(), delta=st.floats(0.01, 1.0))
def test_opsm_drops_drifted_mistakes_and_nothing_else(case, delta):
    behaviour = torch.where(case.mask, 0.0, math.nan).double()
    logprobs = behaviour - case.log_weight
    advantages = torch.where(case.trajectory % 3 == 0, -1.0, (case.trajectory % 3 - 1).double()).double()
    found = opsm(logprobs, behaviour, advantages, case.trajectory, case.mask, delta=delta)
    for _, run in groupby(range(len(found)), key=lambda i: int(case.trajectory[i])):
        kept = list(run)
        voting = [i for i in kept if case.mask[i]]
        drifts = [min(max(float(case.log_weight[i]), -20.0), 20.0) for i in voting]
        drifted = bool(drifts) and sum(drifts) / len(drifts) > delta
        for i in kept:
            assert bool(found[i]) == (bool(case.mask[i]) and not (float(advantages[i]) < 0 and drifted))


@settings(max_examples=40, deadline=None)
@given(case=tokens(), cut=st.integers(0, 24))
def test_normalised_weights_have_mean_one_over_micro_batches(case, cut):
    weight = truncated(*case, level="token", high=5.0)
    columns = (weight, case.trajectory, case.mask)
    parts = [[x[:cut] for x in columns], [x[cut:] for x in columns]]
    sums = WeightSums(*(a + b for a, b in zip(*(weight_sums(*p, level="token") for p in parts), strict=True)))
    found = torch.cat([normalised(w, m, sums) for w, _, m in parts])
    total, n = float(weight[case.mask].sum()), int(case.mask.sum())
    if n:
        torch.testing.assert_close(found[case.mask], weight[case.mask] * n / total)
        assert float(found[case.mask].mean()) == pytest.approx(1)
        squares = sum(w * w for w in weight[case.mask].tolist())
        assert effective_sample_size(sums) == pytest.approx(total**2 / squares)
        assert effective_sample_size(sums) <= n * (1 + 1e-12)
    assert not found[~case.mask].any()


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@settings(max_examples=40, deadline=None)
@given(case=tokens())
def test_weights_of_trajectories_have_mean_one_over_trajectories_however_long(level, case):
    """verl and slime divide by the mean over sequences; one over tokens would count long ones more."""
    weight = truncated(*case, level=level, high=5.0)
    found = normalised(weight, case.mask, weight_sums(weight, case.trajectory, case.mask, level=level))
    firsts = {int(n): i for i, n in reversed(list(enumerate(case.trajectory))) if case.mask[i]}
    if firsts:
        assert sum(float(found[i]) for i in firsts.values()) / len(firsts) == pytest.approx(1)
        mean = sum(float(weight[i]) for i in firsts.values()) / len(firsts)
        torch.testing.assert_close(found[case.mask], weight[case.mask] / mean)
    assert not found[~case.mask].any()


def slow_divergences(given: Tokens, measure: str, level: str) -> list[float]:
    """k2 or k3 of each token at the level; NaN where masked."""
    found = [math.nan] * len(given.mask)
    for _, run in groupby(range(len(found)), key=lambda i: int(given.trajectory[i])):
        kept = [i for i in run if given.mask[i]]
        logs = [min(max(float(given.log_weight[i]), -20.0), 20.0) for i in kept]
        each = [x * x / 2 if measure == "k2" else math.exp(x) - 1 - x for x in logs]
        for i, own in zip(kept, each, strict=True):
            known = {"token": own, "sequence": sum(each), "mean": sum(each) / len(each), "max": max(each)}
            found[i] = known[level]
    return found


@pytest.mark.parametrize("level", ["token", "sequence", "mean", "max"])
@pytest.mark.parametrize("measure", ["k2", "k3"])
@settings(max_examples=25, deadline=None)
@given(case=tokens(), high=st.sampled_from([0.013, 0.21, 3.7]))
def test_tokens_kept_by_k2_and_k3_are_those_of_a_slow_loop(measure, level, case, high):
    wanted = [x <= high for x in slow_divergences(case, measure, level)]
    assert keep_mask(*case, level=level, measure=measure, high=high).tolist() == wanted


def test_a_mean_of_k3_sees_what_a_geometric_mean_of_ratios_does_not():
    """Tokens twice and half as likely: their geometric mean is 1."""
    logs, mask = torch.tensor([math.log(2), -math.log(2)]), torch.tensor([True, True])
    numbers = torch.tensor([0, 0])
    assert keep_mask(logs, numbers, mask, level="geometric", low=0.999, high=1.001).all()
    assert not keep_mask(logs, numbers, mask, level="mean", measure="k3", high=0.1).any()
    # k3: 2 - 1 - log 2 and 1/2 - 1 + log 2, of which the mean is 1/4
    assert keep_mask(logs, numbers, mask, level="mean", measure="k3", high=0.2501).all()


def test_a_measure_without_the_level_is_refused():
    case = Tokens(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor([True]))
    with pytest.raises(ValueError, match="geometric"):
        keep_mask(*case, level="mean", high=2.0)
    with pytest.raises(ValueError, match="mean"):
        keep_mask(*case, level="geometric", measure="k3", high=2.0)


def test_weights_that_are_all_zero_divide_by_nothing():
    """verl 0.9.1 raises ZeroDivisionError here when IcePop rejects a whole batch."""
    logs, mask = torch.full((3,), 9.0), torch.tensor([True, True, False])
    weight = masked(logs, torch.tensor([0, 0, 1]), mask, level="token", low=0.5, high=5.0)
    numbers = torch.tensor([0, 0, 1])
    sums = weight_sums(weight, numbers, mask, level="token")
    assert [float(x) for x in sums] == [0.0, 0.0, 2.0]
    assert effective_sample_size(sums) == 0.0
    assert normalised(weight, mask, sums).tolist() == [0.0, 0.0, 0.0]
    nothing = weight_sums(weight, numbers, torch.zeros(3, dtype=torch.bool), level="token")
    assert effective_sample_size(nothing) == 0.0


def test_equal_weights_are_worth_every_token():
    mask = torch.ones(4, dtype=torch.bool)
    for weight, size in ((torch.full((4,), 0.3), 4), (torch.tensor([1.0, 0.0, 0.0, 0.0]), 1)):
        sums = weight_sums(weight, torch.arange(4), mask, level="token")
        assert effective_sample_size(sums) == pytest.approx(size)


@pytest.mark.parametrize("born", [0, 3, 17])
@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_the_interpolation_is_areals_with_the_version_that_the_step_makes(born, lag):
    behaviour, policy = math.log(0.2), math.log(0.5)
    made = born + lag + 1
    alpha = min(max((made - 1 - born) / (made - born), 0.0), 1.0)
    args = (
        torch.tensor([policy], dtype=torch.float64),
        torch.tensor([behaviour], dtype=torch.float64),
        torch.tensor([lag]),
        torch.tensor([True]),
    )
    assert proximal_interpolated(*args).item() == pytest.approx(behaviour + alpha * (policy - behaviour), abs=1e-15)
    linear = proximal_interpolated(*args, method="linear").item()
    assert linear == pytest.approx(math.log((1 - alpha) * 0.2 + alpha * 0.5), abs=1e-15)


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_without_lag_the_proximal_policy_is_the_behaviour_digit_for_digit(method):
    behaviour = -torch.rand(100)
    logprobs = behaviour - torch.rand(100)
    logprobs[0] = -math.inf
    lags = torch.zeros(100, dtype=torch.int64)
    lags[50:] = -1
    mask = torch.ones(100, dtype=torch.bool)
    assert torch.equal(proximal_interpolated(logprobs, behaviour, lags, mask, method=method), behaviour)


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_masked_tokens_do_not_reach_the_proximal_policy(method):
    logprobs, behaviour = torch.tensor([-1.0, math.nan, -1.0]), torch.tensor([-2.0, -1.0, math.nan])
    mask = torch.tensor([True, False, False])
    found = proximal_interpolated(logprobs, behaviour, torch.tensor([1, 5, 5]), mask, method=method)
    assert found[1:].tolist() == [0.0, 0.0]
    assert -2.0 < found[0].item() < -1.0


def test_an_unknown_method_is_refused():
    one, mask = torch.zeros(1), torch.tensor([True])
    with pytest.raises(ValueError, match="loglinear"):
        proximal_interpolated(one, one, torch.zeros(1, dtype=torch.int64), mask, method="cubic")  # type: ignore[arg-type]
