"""What each turn earned, compared with its siblings' and credited to tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns, normalized_turns, turn_of_tokens, turn_returns
from protocol.messages import Segment, Status, Trajectory, TrajectoryGroup
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

number = st.floats(-3, 3).map(lambda x: round(x, 3))


def trajectory(*turns: float, reward: float = 0.0, status=Status.ANSWERED) -> Trajectory:
    """prompt, then for each of `turns` two sampled tokens that earned it and an observation of one."""
    segments: list[Segment] = [prompt_segment([1, 2])]
    for earned in turns:
        segments += [policy_segment([3, 4]).model_copy(update={"reward": earned}), observation_segment([5])]
    return Trajectory(status=status, segments=tuple(segments), reward=reward)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(run="r", seq=1, question=make_question(1), trajectories=trajectories)


def test_turns_are_read_with_the_outcome_on_the_last():
    read = Turns.of(
        [group(trajectory(0.1, 0.2, reward=1.3), trajectory(reward=5.0)), group(trajectory(0.0, reward=0.5))]
    )
    np.testing.assert_allclose(read.rewards, [[0.1, 1.2], [0, 0], [0.5, 0]])
    assert read.reached.tolist() == [[True, True], [False, False], [True, False]]
    assert Turns.of([]).rewards.shape == (0, 0)


def test_tokens_know_their_turn():
    assert turn_of_tokens(trajectory(0.0, 0.0)).tolist() == [-1, -1, 0, 0, -1, 1, 1, -1]
    assert turn_of_tokens(Trajectory(status=Status.FAILED, segments=())).tolist() == []


def slow_normalized(turns, given_, scope, ddof, epsilon):
    n, width = turns.rewards.shape
    out = np.zeros((n, width))
    for i in range(n):
        for k in range(width):
            if not (given_.valid[i] and turns.reached[i, k]):
                continue
            siblings = [j for j in range(n) if given_.group[j] == given_.group[i] and given_.valid[j]]
            columns = range(width) if scope == "group" else [k]
            peers = [float(turns.rewards[j, c]) for j in siblings for c in columns if turns.reached[j, c]]
            if len(peers) < 2 or max(peers) - min(peers) <= 1e-9 * max(1.0, *map(abs, peers)):
                continue
            mean = math.fsum(peers) / len(peers)
            spread = math.sqrt(math.fsum((p - mean) ** 2 for p in peers) / (len(peers) - ddof))
            out[i, k] = (turns.rewards[i, k] - mean) / (spread + epsilon)
    return out


@st.composite
def batches(draw):
    n, width = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    reached = np.arange(width) < np.array(draw(st.lists(st.integers(0, width), min_size=n, max_size=n)))[:, None]
    rewards = np.array(draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=n, max_size=n)))
    given_ = Outcomes(
        rewards.sum(1),
        np.array(draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))),
        np.array(draw(st.lists(st.sampled_from([3, -1]), min_size=n, max_size=n))),
    )
    return Turns(np.where(reached, rewards, 0.0), reached), given_


@pytest.mark.parametrize("scope", ["turn", "group"])
@settings(max_examples=80, deadline=None)
@given(batches(), st.sampled_from([0, 1]))
def test_normalised_turns_are_what_a_slow_loop_gives(scope, batch, ddof):
    turns, given_ = batch
    found = normalized_turns(turns, given_, scope=scope, ddof=ddof, epsilon=1e-3)
    np.testing.assert_allclose(found, slow_normalized(turns, given_, scope, ddof, 1e-3), rtol=1e-9, atol=1e-9)


def test_a_late_turn_is_compared_with_those_that_reached_it_by_hand():
    turns = Turns(np.array([[1.0, 5], [0, 7], [0, 0]]), np.array([[1, 1], [1, 1], [1, 0]], bool))
    given_ = Outcomes(np.zeros(3), np.ones(3, bool), np.zeros(3, np.int64))
    found = normalized_turns(turns, given_, epsilon=0.0)
    # turn 0: 1 0 0, mean 1/3, deviation sqrt(1/3); turn 1: 5 7 alone, deviation sqrt(2)
    np.testing.assert_allclose(found[:, 0], np.array([2, -1, -1]) / math.sqrt(3))
    np.testing.assert_allclose(found[:, 1], np.array([-1, 1, 0]) / math.sqrt(2))
    alone = Turns(np.array([[1.0, 5], [0, 0]]), np.array([[1, 1], [1, 0]], bool))
    two = Outcomes(np.zeros(2), np.ones(2, bool), np.zeros(2, np.int64))
    assert normalized_turns(alone, two)[0, 1] == 0.0, "nothing to compare with"


def credited(rewards: torch.Tensor, turn: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the return of each token's turn: 0 for a token of none (-1), as in a batch."""
    return torch.where(turn >= 0, turn_returns(rewards, gamma).gather(1, turn.clamp(min=0)), 0.0)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_token_is_credited_with_the_turns_that_follow_discounted_by_turn(data, gamma):
    b, k, t = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    rewards = data.draw(st.lists(st.lists(number, min_size=k, max_size=k), min_size=b, max_size=b))
    turn = data.draw(st.lists(st.lists(st.integers(-1, k - 1), min_size=t, max_size=t), min_size=b, max_size=b))
    found = credited(torch.tensor(rewards, dtype=torch.float64), torch.tensor(turn), gamma)
    for i in range(b):
        for j in range(t):
            at = turn[i][j]
            slow = math.fsum(gamma ** (later - at) * rewards[i][later] for later in range(at, k)) if at >= 0 else 0.0
            assert found[i, j].item() == pytest.approx(slow, abs=1e-12)


def test_turn_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64).requires_grad_()
    found = turn_returns(rewards, 0.5)
    assert found.tolist() == [[3.0, 4.0, 4.0]]
    assert not found.requires_grad
    assert turn_returns(rewards.bfloat16(), 0.5).dtype == torch.bfloat16
    assert turn_returns(torch.zeros(2, 0), 0.5).shape == (2, 0)


def test_from_messages_to_tokens_the_credit_of_process_supervision():
    # arXiv 2402.03300, section 4.1.3: normalise over all steps of the group, then sum those that follow
    g = group(trajectory(0.0, 1.0, reward=1.0), trajectory(0.0, 0.0, reward=0.0))
    normalised = normalized_turns(Turns.of([g]), Outcomes.of([g]), scope="group", epsilon=0.0)
    np.testing.assert_allclose(normalised, [[-0.5, 1.5], [-0.5, -0.5]])  # 0 1 0 0: mean 1/4, deviation 1/2
    turn = torch.from_numpy(np.stack([turn_of_tokens(t) for t in g.trajectories]))
    found = credited(torch.from_numpy(normalised), turn, gamma=1.0)
    np.testing.assert_allclose(found, [[0, 0, 1, 1, 0, 1.5, 1.5, 0], [0, 0, -1, -1, 0, -0.5, -0.5, 0]])
