"""CalibAdv: by hand, and against a slow reference over random groups.

By hand: rewards 1, 0, 0 of one group, advantages 1, -.5, -.5; last turns of 2, 3 and 1 tokens.
    right   searched {a, b}, {c, d}; answered
    wrong   {a, x}: 1 of 2 known, q = .5; {a, b, c, y}: a was seen, b and c are new: q = 2 / 4; answered
    astray  {x, y}: q = 0; {x, y, c}: two passages of one earlier turn again: q = 0; answered
Sums of the last turns: + 1 * 2, - (.5 * 3 + .5 * 1) = - 2: already even.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from pydantic import ValidationError

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns, calibrated_turns
from learner.config.algorithm import GrpoSettings, RlooSettings
from learner.config.learner import BatchSettings
from learner.data.batch import build_batch
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment


def trajectory(reward: float, *turns: str, last: int = 2, status: Status = Status.ANSWERED) -> Trajectory:
    """Turns that search and get a passage for each letter, then a last one of `last` tokens."""
    segments = [prompt_segment([1, 2])]
    for number, letters in enumerate(turns):
        observed = observation_segment([5]).model_copy(update={"passage_ids": tuple(letters)})
        segments += [policy_segment([10 + number, 4]), observed]
    return Trajectory(status=status, segments=(*segments, policy_segment([3] * last)), reward=reward)


def group(seq: int, *trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(run="r", seq=seq, question=make_question(seq), trajectories=trajectories)


def calibrated(advantages: Sequence[float], *groups: TrajectoryGroup, right: float = 0.7) -> list[list[float]]:
    found = calibrated_turns(Turns.of(groups), Outcomes.of(groups), np.array(advantages, np.float64), right=right)
    return [[float(round(x, 9)) for x in row] for row in found]


RIGHT, WRONG, ASTRAY = (
    trajectory(1, "ab", "cd"),
    trajectory(0, "ax", "abcy", last=3),
    trajectory(0, "xy", "xyc", last=1),
)


def test_a_wrong_turn_is_blamed_less_for_what_right_siblings_found_too() -> None:
    found = calibrated([1, -0.5, -0.5], group(1, RIGHT, WRONG, ASTRAY))
    assert found == [[1, 1, 1], [-0.25, -0.25, -0.5], [-0.5, -0.5, -0.5]]


def test_the_last_turns_of_a_group_are_balanced_over_their_tokens() -> None:
    longer = trajectory(0, "ax", last=7)
    # + 1 * 2; - (.5 * 7 + .5 * 1) = - 4: the positive ones double
    assert calibrated([1, -0.5, -0.5], group(1, RIGHT, longer, ASTRAY)) == [
        [1, 1, 2],
        [-0.25, -0.5, 0],
        [-0.5, -0.5, -0.5],
    ]
    # without a sign there is nothing to balance: the answers of the first group teach nothing, its searches do
    alone = group(1, trajectory(0, "a"), trajectory(0, "b"))
    assert calibrated([-1, -1, 1, -0.5, -0.5], alone, group(2, RIGHT, WRONG, ASTRAY))[:2] == [[-1, 0, 0], [-1, 0, 0]]
    assert calibrated([0, 0], alone) == [[0, 0], [0, 0]]


def test_only_the_best_and_good_enough_show_what_to_find() -> None:
    half = trajectory(0.6, "ab")
    assert calibrated([1, -1], group(1, half, trajectory(0, "ab")))[1] == [-1, -1]
    assert calibrated([1, -1], group(1, half, trajectory(0, "ab")), right=0.5)[1] == [0, -1]
    better = trajectory(0.9, "cd")
    assert calibrated([1, 0.5, -1], group(1, better, trajectory(0.8, "ab"), trajectory(0, "ab")))[2] == [-1, -1]
    # a turn that repeats an earlier one word for word earns no pardon, nor does one without passages
    again = trajectory(0, "x", "c")
    segments = tuple(policy_segment([10, 4]) if n == 3 else s for n, s in enumerate(again.segments))
    again = again.model_copy(update={"segments": segments})
    assert calibrated([1, -1], group(1, better, again))[1] == [-1, -1, -1]
    assert calibrated([1, -1], group(1, better, trajectory(0, "", "c")))[1] == [-1, 0, -1]


def test_invalid_trajectories_count_nowhere() -> None:
    lost = trajectory(1, "xy", last=50, status=Status.FAILED)
    found = calibrated([1, -0.5, -0.5, 0], group(1, RIGHT, WRONG, ASTRAY, lost))
    assert found == [[1, 1, 1], [-0.25, -0.25, -0.5], [-0.5, -0.5, -0.5], [0, 0, 0]]
    empty = Trajectory(status=Status.FAILED, segments=(prompt_segment([1]),), reward=0)
    assert calibrated([0], group(1, empty)) == [[]]


def slow(groups: Sequence[TrajectoryGroup], advantages: list[float]) -> list[list[float]]:
    """Written from the formulas, one turn at a time."""
    rows, at = [], 0
    for g in groups:
        own = advantages[at : at + len(g.trajectories)]
        at += len(own)
        best = max((t.reward for t in g.trajectories if t.status.is_valid), default=0.0)
        known = set()
        for t in g.trajectories:
            if t.status.is_valid and t.reward == best >= 0.7:
                known |= {p for s in t.segments for p in s.passage_ids}
        here = []
        for t, a in zip(g.trajectories, own, strict=True):
            searches = [set(s.passage_ids) for s in t.segments[2::2]]
            row = []
            for k, passages in enumerate(searches):
                seen = set().union(*searches[:k])
                again = any(len(passages & s) > 1 for s in searches[:k])
                q = 0.0 if again or not passages else len([p for p in passages if p in known - seen]) / len(passages)
                row.append(a * (1 - q) if a < 0 else a)
            here.append([*row, a])
        ends = [(row[-1], len(t.segments[-1].ids)) for row, t in zip(here, g.trajectories, strict=True)]
        up, down = sum(a * n for a, n in ends if a > 0), sum(-a * n for a, n in ends if a < 0)
        for row in here:
            if not up or not down:
                row[-1] = 0.0
            elif row[-1] > 0:
                row[-1] *= down / up
        rows += here
    return rows


def test_it_is_the_slow_reference_on_random_groups() -> None:
    draw = random.Random(4)
    for _ in range(60):
        groups = [
            group(
                n,
                *(
                    trajectory(
                        draw.choice([0.0, 0.3, 0.8, 1.0]),
                        *("".join(draw.sample("abcdefg", draw.randint(0, 3))) for _ in range(draw.randint(0, 3))),
                        last=draw.randint(1, 6),
                        status=draw.choice([Status.ANSWERED, Status.ANSWERED, Status.OUT_OF_TURNS, Status.FAILED]),
                    )
                    for _ in range(draw.randint(1, 5))
                ),
            )
            for n in (1, 2, 3)
        ]
        algorithm = build_algorithm(GrpoSettings(turns="calibrated"))
        outcomes = Outcomes.of(groups)
        found = algorithm.turn_advantages(outcomes, Turns.of(groups))
        assert found is not None
        wanted = slow(groups, algorithm.advantages(outcomes).tolist())
        for row, want in zip(found.tolist(), wanted, strict=True):
            assert row == pytest.approx(want + [0.0] * (len(row) - len(want)), rel=1e-12, abs=1e-15)


def test_tokens_get_the_advantage_of_their_turn_in_any_layout() -> None:
    algorithm = build_algorithm(GrpoSettings(turns="calibrated", std="none"))
    for layout in ({}, {"row_tokens": 64}, {"micro_batch_tokens": 1}, {"share_prompts": True}):
        batch = build_batch(
            [group(1, RIGHT, WRONG, ASTRAY)], algorithm, now_step=0, lineage=(PolicyVersion(1, 0),), max_lag=9,
            settings=BatchSettings(**layout), temperature=1.0, ranks=2,
        )  # fmt: skip
        found = {
            (int(n), int(k)): float(a)
            for m in batch.micro_batches
            for n, k, a in zip(m.trajectory, m.turn, m.advantages, strict=True)
        }
        third = 1 / 3
        wanted = {(0, 0): 2 * third, (0, 1): 2 * third, (0, 2): 2 * third, (1, 0): -third / 2, (1, 1): -third / 2}
        wanted |= {(1, 2): -third, (2, 0): -third, (2, 1): -third, (2, 2): -third}
        assert found == pytest.approx(wanted, abs=1e-6)


def test_it_begins_from_any_advantage_of_a_group() -> None:
    assert GrpoSettings(turns="calibrated", estimator="rloo", std="none", parts={"em": 1.0}, normalize_batch=True)
    for wrong in ({"turns": "turn", "estimator": "rloo"}, {"turns": "group", "parts": {"em": 1.0}}):
        with pytest.raises(ValidationError):
            GrpoSettings.model_validate(wrong)
    with pytest.raises(ValidationError):
        RlooSettings.model_validate({"turns": "calibrated"})
