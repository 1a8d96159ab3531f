"""Advantages compared with manually computed values."""

from __future__ import annotations

import numpy as np
import pytest

from learner.algorithms.advantages.group import grpo_advantages, rloo_advantages
from learner.algorithms.advantages.outcomes import Outcomes, informative
from protocol.errors import UserError
from protocol.messages import Status, TrajectoryGroup
from tests.support.messages import make_group, make_question, make_trajectory


def outcomes(rewards, group=None, valid=None) -> Outcomes:
    n = len(rewards)
    return Outcomes(
        np.asarray(rewards, np.float64),
        np.ones(n, bool) if valid is None else np.asarray(valid, bool),
        np.zeros(n, np.int64) if group is None else np.asarray(group, np.int64),
    )


def grpo(given: Outcomes, *, std="group", ddof=1, epsilon=0.0):
    return grpo_advantages(given, std=std, ddof=ddof, epsilon=epsilon)


def test_one_right_of_four_by_hand():
    # mean 1/4; sum of squares 9/16 + 3/16 = 3/4; variance 1/4 (n - 1) or 3/16 (n)
    np.testing.assert_allclose(grpo(outcomes([1, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], rtol=1e-12)
    np.testing.assert_allclose(grpo_advantages(outcomes([1, 0, 0, 0]), epsilon=0.0)[0], 1.5, rtol=1e-12)
    np.testing.assert_allclose(grpo(outcomes([1, 0, 0, 0]), ddof=0), np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-12)


def test_epsilon_is_added_to_the_deviation():
    np.testing.assert_allclose(grpo(outcomes([1, 0, 0, 0]), epsilon=0.5), [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


def test_without_the_deviation_it_is_the_centred_reward():
    np.testing.assert_allclose(grpo(outcomes([1, 0, 0, 0]), std="none"), [0.75, -0.25, -0.25, -0.25])


def test_groups_interleaved_and_of_unequal_size_do_not_mix():
    given = outcomes([1, 10, 0, 20, 30], group=[7, 3, 7, 3, 3])
    np.testing.assert_allclose(grpo(given), [2**-0.5, -1, -(2**-0.5), 0, 1], atol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward):
    assert grpo(outcomes([reward] * 5)).tolist() == [0.0] * 5


def test_rewards_that_differ_by_rounding_only_are_equal():
    assert grpo(outcomes([0.1 + 0.2, 0.3, 0.3, 0.3])).tolist() == [0.0] * 4
    assert rloo_advantages(outcomes([0.1 + 0.2, 0.3, 0.3, 0.3])).tolist() == [0.0] * 4


def test_a_group_of_one_gets_zero():
    assert grpo(outcomes([5.0])).tolist() == [0.0]
    assert rloo_advantages(outcomes([5.0])).tolist() == [0.0]


def test_invalid_trajectories_get_zero_and_change_no_other():
    given = outcomes([1, 0, 99, 0, 0], valid=[1, 1, 0, 1, 1])
    np.testing.assert_allclose(grpo(given), [1.5, -0.5, 0, -0.5, -0.5], rtol=1e-12)
    assert grpo(outcomes([1, 0, 0], valid=[1, 0, 0])).tolist() == [0.0] * 3, "one voter has no one to compare with"
    assert grpo(outcomes([1, 0], valid=[0, 0])).tolist() == [0.0] * 2


def test_leave_one_out_is_the_reward_against_the_mean_of_the_others():
    rewards = [1.0, 0.2, 0.0, 0.7]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(rloo_advantages(outcomes(rewards)), expected, rtol=1e-12)


def test_a_batch_without_trajectories_has_no_advantages():
    assert grpo(outcomes([])).shape == (0,)


def test_outcomes_are_read_from_groups_in_order():
    stale = TrajectoryGroup(
        run="r",
        seq=2,
        question=make_question(2),
        trajectories=(make_trajectory(0.5, status=Status.STALE), make_trajectory(0.25)),
    )
    read = Outcomes.of([make_group(1, (1.0, 0.0)), stale])
    assert read.rewards.tolist() == [1.0, 0.0, 0.5, 0.25]
    assert read.valid.tolist() == [True, True, False, True]
    assert read.group.tolist() == [0, 0, 1, 1]


def test_the_control_permutes_rewards_across_groups_but_not_invalid_ones():
    rewards = np.arange(40.0)
    valid = [i % 5 != 0 for i in range(40)]
    given = outcomes(rewards, valid=valid, group=np.repeat(np.arange(10), 4))
    shuffled = given.shuffled(7)
    assert sorted(shuffled.rewards) == sorted(rewards)
    assert shuffled.rewards[::5].tolist() == rewards[::5].tolist(), "a trajectory without a vote keeps its own"
    moved = shuffled.rewards.astype(int)[np.array(valid)] // 4 != np.repeat(np.arange(10), 4)[np.array(valid)]
    assert moved.mean() > 0.5, "most rewards come from another group"
    assert shuffled.rewards.tolist() == given.shuffled(7).rewards.tolist() != given.shuffled(8).rewards.tolist()


def test_outcomes_carry_lengths_truncation_and_the_parts_of_the_reward():
    formed = make_trajectory(0.5, status=Status.TRUNCATED, last=(9, 9, 9)).model_copy(
        update={"rewards": {"em": 0.5, "format": 0.2}}
    )
    question = make_question(2)
    read = Outcomes.of([TrajectoryGroup(run="r", seq=2, question=question, trajectories=(formed, make_trajectory(1)))])
    assert read.lengths.tolist() == [5, 4], "sampled tokens only"
    assert read.truncated.tolist() == [True, False]
    assert {name: part.tolist() for name, part in read.parts.items()} == {"em": [0.5, 1.0], "format": [0.2, 0.0]}
    assert Outcomes.of([]).rewards.shape == (0,)


def test_outcomes_without_lengths_are_of_equal_length_and_none_is_truncated():
    given = outcomes([1, 2])
    assert given.lengths.tolist() == [1, 1]
    assert given.truncated.tolist() == [False, False]


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 rewards"):
        outcomes([1, 0], valid=[1, 1, 1])
    with pytest.raises(ValueError, match="2 rewards"):
        Outcomes(np.zeros(2), np.ones(2, bool), np.zeros(2, np.int64), parts={"em": np.zeros(3)})


def test_the_control_moves_the_parts_with_their_reward_and_leaves_the_lengths():
    rewards = np.arange(20.0)
    given = Outcomes(rewards, np.ones(20, bool), np.arange(20) // 4, lengths=np.arange(20), parts={"em": rewards + 100})
    shuffled = given.shuffled(3)
    assert shuffled.parts["em"].tolist() == (shuffled.rewards + 100).tolist()
    assert shuffled.lengths.tolist() == given.lengths.tolist()
    assert shuffled.rewards.tolist() != rewards.tolist()


def test_a_part_of_the_reward_takes_its_place_and_an_unknown_one_is_refused_with_those_that_are():
    parts = {"em": np.array([3.0, 4.0]), "f1": np.zeros(2)}
    given = Outcomes(np.array([1.0, 0.0]), np.array([True, False]), np.zeros(2, np.int64), parts=parts)
    found = given.part("em")
    assert (found.rewards.tolist(), found.valid.tolist()) == ([3.0, 4.0], [True, False])
    assert given.rewards.tolist() == [1.0, 0.0]
    with pytest.raises(UserError, match=r"no trajectory .* 'EM'"):
        given.part("EM")
    empty = Outcomes(np.ones(2), np.zeros(2, bool), np.zeros(2, np.int64))
    assert empty.part("em").rewards.tolist() == [0.0, 0.0], "a batch that failed brings no parts"


@pytest.mark.parametrize(
    ("rewards", "valid", "expected"),
    [
        ([1, 0, 0], [1, 1, 1], True),
        ([1, 1, 1], [1, 1, 1], False),
        ([1, 0, 0], [0, 1, 1], False),
        ([1, 0], [1, 0], False),
        ([1], [1], False),
        ([], [], False),
        ([0.1 + 0.2, 0.3, 0.3], [1, 1, 1], False),
        ([0.3, 0.3 + 1e-6], [1, 1], True),
        ([1e9, 1e9 + 1e-3], [1, 1], False),
    ],
)
def test_a_group_is_informative_if_two_valid_rewards_differ_by_more_than_rounding(rewards, valid, expected):
    found = informative(np.asarray(rewards, np.float64), np.asarray(valid, bool))
    assert found is expected
    assert bool(grpo(outcomes(rewards, valid=valid)).any()) is expected, "exactly those have an advantage"
