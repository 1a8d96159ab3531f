"""Every advantage of a trajectory against a slow loop over its formula, and what all of them must keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.group import (
    dr_grpo_advantages,
    gpg_advantages,
    grpo_advantages,
    max_rl_advantages,
    normalized_batch,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from learner.algorithms.advantages.outcomes import Outcomes
from learner.config.algorithm import GrpoSettings


def outcomes(rewards, group=None, valid=None, lengths=None, parts=None) -> Outcomes:
    n = len(rewards)
    return Outcomes(
        np.asarray(rewards, np.float64),
        np.ones(n, bool) if valid is None else np.asarray(valid, bool),
        np.zeros(n, np.int64) if group is None else np.asarray(group, np.int64),
        np.arange(1, n + 1) if lengths is None else np.asarray(lengths, np.int64),
        parts={"em": np.asarray(rewards, np.float64), "form": np.cos(np.arange(n))} if parts is None else parts,
    )


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values, ddof):
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def equal(values):
    return len(values) < 2 or max(values) - min(values) <= 1e-9 * max(1.0, *map(abs, values))


def loop(given, rule, alone=lambda r, j, i: 0.0):
    """rule(rewards of the voters of i's group, place of i among them, i) for each voter i; 0 for all others."""
    out = []
    for i in range(len(given.rewards)):
        siblings = [j for j in range(len(given.rewards)) if given.group[j] == given.group[i] and given.valid[j]]
        if not given.valid[i]:
            out.append(0.0)
            continue
        rewards = [float(given.rewards[j]) for j in siblings]
        out.append((alone if equal(rewards) else rule)(rewards, siblings.index(i), i))
    return np.array(out)


def voting(given):
    return [float(r) for r, v in zip(given.rewards, given.valid, strict=True) if v]


def slow_opo(given):
    def rule(r, j, i):
        lengths = [
            int(n) for n, g, v in zip(given.lengths, given.group, given.valid, strict=True) if v and g == given.group[i]
        ]
        return r[j] - sum(a * b for a, b in zip(lengths, r, strict=True)) / sum(lengths)

    return loop(given, rule)


def slow_pass_at_k(given):
    def rule(r, j, i):
        best = max(r)
        second = sorted(r)[-2]
        if best - second <= 1e-9 * max(1.0, *map(abs, r)) or r[j] != best:
            return 0.0
        return (best - second) / (deviation(r, 1) + 1e-3)

    return loop(given, rule)


def slow_gpg(given, counted):
    alpha = len(voting(given)) / max(counted, 1)
    return loop(given, lambda r, j, i: alpha * (r[j] - mean(r)))


def slow_useful(given):
    return sum(loop(given, lambda r, j, i: 1.0))


def slow_reinforce_batch(given):
    every = voting(given)
    if equal(every):
        return np.zeros(len(given.rewards))
    return np.where(given.valid, given.rewards - mean(every), 0.0)


def slow_normalized_batch(given):
    centred = loop(given, lambda r, j, i: r[j] - mean(r))
    every = [a for a, v in zip(centred.tolist(), given.valid, strict=True) if v]
    if equal(every):
        return np.zeros(len(centred))
    return np.where(given.valid, (centred - mean(every)) / (deviation(every, 1) + 1e-4), 0.0)


FAMILY = {
    "grpo": (
        lambda g: grpo_advantages(g, ddof=1, epsilon=1e-4),
        lambda g: loop(g, lambda r, j, i: (r[j] - mean(r)) / (deviation(r, 1) + 1e-4)),
    ),
    "grpo_biased": (
        lambda g: grpo_advantages(g, ddof=0, epsilon=0.0),
        lambda g: loop(g, lambda r, j, i: (r[j] - mean(r)) / deviation(r, 0)),
    ),
    "grpo_batch": (
        lambda g: grpo_advantages(g, std="batch", ddof=1, epsilon=1e-4),
        lambda g: loop(g, lambda r, j, i: (r[j] - mean(r)) / (deviation(voting(g), 1) + 1e-4)),
    ),
    "dr_grpo": (dr_grpo_advantages, lambda g: loop(g, lambda r, j, i: r[j] - mean(r))),
    "rloo": (rloo_advantages, lambda g: loop(g, lambda r, j, i: r[j] - mean(r[:j] + r[j + 1 :]))),
    "reinforce_pp_baseline": (
        reinforce_pp_baseline_advantages,
        lambda g: loop(g, lambda r, j, i: r[j] - mean(r)),
    ),
    "reinforce_group": (
        lambda g: reinforce_advantages(g, baseline="group"),
        lambda g: loop(g, lambda r, j, i: r[j] - mean(r)),
    ),
    "reinforce_batch": (lambda g: reinforce_advantages(g, baseline="batch"), slow_reinforce_batch),
    "opo": (opo_advantages, slow_opo),
    "max_rl": (
        max_rl_advantages,
        lambda g: loop(g, lambda r, j, i: (r[j] - mean(r)) / mean(r) if mean(r) > 1e-9 * max(1, *map(abs, r)) else 0),
    ),
    "pass_at_k": (lambda g: pass_at_k_advantages(g, epsilon=1e-3), slow_pass_at_k),
    "normalized batch": (
        lambda g: normalized_batch(dr_grpo_advantages(g), g.valid, epsilon=1e-4),
        lambda g: slow_normalized_batch(g),
    ),
    "gpg": (gpg_advantages, lambda g: slow_gpg(g, slow_useful(g))),
}
RAW = {
    "reinforce_none": (reinforce_advantages, lambda g: np.where(g.valid, g.rewards, 0.0)),
}
EVERY = FAMILY | RAW
every = pytest.mark.parametrize("name", EVERY)
comparing = pytest.mark.parametrize("name", [n for n in FAMILY if n not in ("reinforce_batch", "normalized batch")])
"""Those that compare siblings alone, by their reward."""


@st.composite
def batches(draw):
    """Up to 12 trajectories of up to 4 interleaved groups of any size; rewards of few values, so that ties are met."""
    n = draw(st.integers(1, 12))
    lists = lambda element: st.lists(element, min_size=n, max_size=n)  # noqa: E731
    value = st.sampled_from([0.0, 1.0, 0.3, 0.1 + 0.2, -1.0, 0.5]) | st.floats(-5, 5).map(lambda x: round(x, 3))
    return outcomes(
        draw(lists(value)),
        draw(lists(st.sampled_from([7, -3, 0, 11]))),
        draw(lists(st.sampled_from([True, True, True, False]))),
        draw(lists(st.integers(1, 500))),
        {"em": np.array(draw(lists(value))), "form": np.array(draw(lists(value)))},
    )


@every
@settings(max_examples=25, deadline=None)
@given(batches())
def test_it_is_what_a_slow_loop_over_the_formula_gives(name, batch):
    fast, slow = EVERY[name]
    np.testing.assert_allclose(fast(batch), slow(batch), rtol=1e-9, atol=1e-9)


@every
@settings(max_examples=10, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_advantages_follow_their_trajectory_in_any_order(name, batch, random):
    order = list(range(len(batch.rewards)))
    random.shuffle(order)
    moved = Outcomes(
        batch.rewards[order],
        batch.valid[order],
        batch.group[order],
        batch.lengths[order],
        parts={k: v[order] for k, v in batch.parts.items()},
    )
    expected = EVERY[name][0](batch)[order]
    if name == "pass_at_k":  # equal best rewards give 0 to all, so the order cannot decide
        assert (EVERY[name][0](moved) != 0).tolist() == (expected != 0).tolist()
    np.testing.assert_allclose(EVERY[name][0](moved), expected, rtol=1e-9, atol=1e-12)


@every
@settings(max_examples=10, deadline=None)
@given(batches())
def test_invalid_trajectories_get_exactly_zero_and_change_no_other(name, batch):
    found = EVERY[name][0](batch)
    assert (found[~batch.valid] == 0).all()
    other = Outcomes(
        np.where(batch.valid, batch.rewards, 77.0),
        batch.valid,
        batch.group,
        np.where(batch.valid, batch.lengths, 9999),
        parts={k: np.where(batch.valid, v, -50.0) for k, v in batch.parts.items()},
    )
    assert EVERY[name][0](other).tolist() == found.tolist()


@comparing
def test_a_group_of_one_gets_exactly_zero(name):
    assert FAMILY[name][0](outcomes([5.0])).tolist() == [0.0]
    mixed = FAMILY[name][0](outcomes([5.0, 1.0, 0.0], group=[1, 2, 2]))
    assert mixed[0] == 0.0
    assert mixed[1] > 0


@comparing
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3, 0.3], [1e9, 1e9 * (1 + 1e-15), 1e9], [0.0] * 3, [-2.0] * 2])
def test_a_group_of_equal_rewards_gets_exactly_zero_whatever_the_rounding(name, rewards):
    assert FAMILY[name][0](outcomes(rewards)).tolist() == [0.0] * len(rewards)


@every
def test_a_batch_without_valid_trajectories_has_no_advantages(name):
    empty = outcomes([], parts={"em": np.zeros(0), "form": np.zeros(0)})
    assert EVERY[name][0](empty).shape == (0,)
    assert EVERY[name][0](outcomes([1.0, 0.0, 3.0], valid=[0, 0, 0])).tolist() == [0.0] * 3


@every
def test_the_outcomes_are_left_as_they_were(name):
    given_ = outcomes([1.0, 0.0, 0.5, 0.2], group=[0, 0, 1, 1], valid=[1, 1, 1, 0])
    before = given_.rewards.copy()
    found = EVERY[name][0](given_)
    found += 1.0
    assert given_.rewards.tolist() == before.tolist()
    assert found.dtype == np.float64


def test_the_batch_deviation_by_hand():
    # rewards 1 0 | 1 1: mean 3/4, sum of squares 3 * 1/16 + 9/16 = 3/4, variance 1/4; the second group is all right
    found = grpo_advantages(outcomes([1, 0, 1, 1], group=[0, 0, 1, 1]), std="batch", ddof=1, epsilon=0.0)
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0, 0.0], rtol=1e-12)


def test_opo_weighs_the_baseline_by_length_by_hand():
    # baseline (10 * 1 + 30 * 0) / 40 = 1/4
    np.testing.assert_allclose(opo_advantages(outcomes([1, 0], lengths=[10, 30])), [0.75, -0.25])
    np.testing.assert_allclose(opo_advantages(outcomes([1, 0], lengths=[0, 0])), [0.5, -0.5])


def test_gpg_makes_up_for_trajectories_without_a_gradient_by_hand():
    batch = outcomes([1, 0, 1, 1, 0, 0], group=[0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(gpg_advantages(batch), [1.5, -1.5, 0, 0, 0, 0])  # 6 / 2
    assert gpg_advantages(outcomes([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_only_the_best_of_k_is_credited_by_hand():
    # 1.0, 0.4, 0.1: mean 0.5, squares 0.25 + 0.01 + 0.16 = 0.42, deviation sqrt(0.21)
    found = pass_at_k_advantages(outcomes([0.4, 1.0, 0.1]), epsilon=0.0)
    np.testing.assert_allclose(found, [0.0, 0.6 / math.sqrt(0.21), 0.0], rtol=1e-12)
    np.testing.assert_allclose(pass_at_k_advantages(outcomes([0.4, 1.0, 0.1]), normalize_std=False), [0, 0.6, 0])
    assert pass_at_k_advantages(outcomes([1.0, 1.0, 0.0])).tolist() == [0.0] * 3, "either could be missed"
    assert pass_at_k_advantages(outcomes([0.1 + 0.2, 0.3, 0.0])).tolist() == [0.0] * 3, "a tie but for rounding"


def test_maxrl_by_hand():
    np.testing.assert_allclose(max_rl_advantages(outcomes([1, 0, 0, 0])), [3.0, -1.0, -1.0, -1.0])
    assert max_rl_advantages(outcomes([1.0, -1.0])).tolist() == [0.0, 0.0], "a mean of 0"
    assert max_rl_advantages(outcomes([-1.0, -2.0])).tolist() == [0.0, 0.0]
    assert max_rl_advantages(outcomes([0.1, 0.2, -0.3])).tolist() == [0.0] * 3, "a mean of 0 but for rounding"


def test_reinforce_without_a_baseline_is_the_reward():
    batch = outcomes([1.0, 0.5, 0.7], group=[0, 0, 9], valid=[1, 0, 1])
    assert reinforce_advantages(batch).tolist() == [1.0, 0.0, 0.7]
    np.testing.assert_allclose(reinforce_advantages(batch, baseline="batch"), [0.15, 0, -0.15])
    assert reinforce_advantages(outcomes([2.0, 9.0], valid=[1, 0]), baseline="batch").tolist() == [0.0, 0.0]
    assert reinforce_advantages(outcomes([0.1 + 0.2, 0.3], group=[0, 1]), baseline="batch").tolist() == [0.0, 0.0]


def test_groups_that_teach_nothing_keep_exactly_0_when_the_batch_is_normalised():
    """Else their share in a batch, `zero_advantage_share`, would not be seen (GDPO, two parts)."""
    gdpo = GrpoSettings(parts={"em": 1.0, "format": 0.3}, normalize_batch=True)
    for seed in range(50):
        draw = np.random.default_rng(seed)
        em, form = draw.random((6, 4)), draw.random((6, 4))
        em[:3], form[:3] = em[:3, :1], 0.7
        parts = {"em": em.ravel(), "format": form.ravel()}
        batch = Outcomes(em.ravel() + form.ravel(), np.ones(24, bool), np.repeat(np.arange(6), 4), parts=parts)
        found = build_algorithm(gdpo).advantages(batch)
        assert (found[:12] == 0).all() and (found[12:] != 0).all()
        assert found.mean() == pytest.approx(0, abs=1e-12) and found.std(ddof=1) == pytest.approx(1, abs=1e-5)
