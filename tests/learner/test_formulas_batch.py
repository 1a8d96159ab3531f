"""What spans a batch, as settings reach it, against slow loops: rewards by parts, scale factors, weights of mean 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs, TokenScores
from learner.config.algorithm import AlgorithmSettings
from learner.config.learner import BatchSettings, TrainerSettings
from learner.data.batch import build_batch
from protocol.codec import decode_as, encode
from protocol.errors import UserError
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, policy_segment, prompt_segment

# group -> (em, form) of each trajectory; None: it failed, and votes nowhere
GROUPS: tuple[tuple[tuple[float, float] | None, ...], ...] = (
    ((1.0, 0.2), (0.0, 0.4), (0.0, 0.1), None),
    ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0)),
    ((1.0, 0.3), (1.0, 0.3)),
    ((0.0, 0.1), (0.0, 0.9), (1.0, 0.5)),
)
WEIGHTS = {"em": 2.0, "form": 0.5}


def algorithm_of(**settings: Any) -> Any:
    """The algorithm, by the union that a settings file goes through."""
    return build_algorithm(TypeAdapter(AlgorithmSettings).validate_python(settings))


def trajectory(parts: tuple[float, float] | None) -> Trajectory:
    segments = (prompt_segment([1, 2]), policy_segment([3, 4]))
    if parts is None:
        return Trajectory(status=Status.FAILED, cause="engine", segments=segments)
    rewards = dict(zip(WEIGHTS, parts, strict=True))
    total = sum(WEIGHTS[name] * value for name, value in rewards.items())
    return Trajectory(status=Status.ANSWERED, segments=segments, reward=total, rewards=rewards)


def over_the_wire() -> list[TrajectoryGroup]:
    """The groups as a rollout server sends them and the learner reads them."""
    sent = [
        TrajectoryGroup(run="t", seq=s, question=make_question(s), trajectories=tuple(map(trajectory, group)))
        for s, group in enumerate(GROUPS, 1)
    ]
    return [decode_as(TrajectoryGroup, encode(group)) for group in sent]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def compared(values: list[float], epsilon: float) -> list[float]:
    if max(values) - min(values) < 1e-9:
        return [0.0] * len(values)
    return [(v - mean(values)) / (deviation(values) + epsilon) for v in values]


def slow_gdpo(epsilon: float, *, whole_batch: bool) -> list[float]:
    """GDPO, equations 4 to 7, and TRL's `normalize_then_sum`: each part in its group, summed, then over the batch."""
    sums: list[list[float]] = []
    for group in GROUPS:
        voting = [t for t in group if t is not None]
        by_part = [compared([t[k] for t in voting], epsilon) for k in range(2)]
        each = iter(
            [sum(w * a for w, a in zip(WEIGHTS.values(), one, strict=True)) for one in zip(*by_part, strict=True)]
        )
        sums.append([math.nan if t is None else next(each) for t in group])
    flat = [a for group in sums for a in group]
    every = [a for a in flat if not math.isnan(a)]
    if whole_batch:
        flat = [(a - mean(every)) / (deviation(every) + epsilon) for a in flat]
    return [0.0 if math.isnan(a) else a for a in flat]


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "gspo", "dapo", "dppo"])
def test_parts_are_compared_by_themselves_and_summed_by_weight(kind: str, whole_batch: bool) -> None:
    settings = {"type": kind, "parts": WEIGHTS, "normalize_batch": whole_batch}
    found = algorithm_of(**settings).advantages(Outcomes.of(over_the_wire()))
    np.testing.assert_allclose(found, slow_gdpo(1e-6, whole_batch=whole_batch), rtol=1e-12, atol=1e-12)


def test_parts_reach_the_tokens_of_a_batch_and_whitening_is_verls_last_step() -> None:
    """verl's GDPO whitens over tokens (`masked_whiten`: n - 1, 1e-8 under the root)."""
    algorithm = algorithm_of(type="grpo", parts=WEIGHTS, whiten=True, std="group")
    batch = build_batch(
        over_the_wire(),
        algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=BatchSettings(),
        temperature=1.0,
    )
    (micro,) = batch.minibatches[0]
    wanted = slow_gdpo(1e-6, whole_batch=False)
    numbers = micro.trajectory.tolist()
    np.testing.assert_allclose(micro.advantages, [wanted[n] for n in numbers], rtol=1e-6)
    n = len(numbers)
    nothing, numbered = torch.zeros(n, dtype=torch.float64), torch.from_numpy(micro.trajectory)
    advantages = torch.tensor([wanted[i] for i in numbers], dtype=torch.float64)
    mask = torch.ones(n, dtype=torch.bool)
    (judged,), _ = algorithm.compute_advantages(
        [TokenScores(nothing, advantages, nothing, nothing, nothing, None, mask, numbered, numbered)],
        lambda vector: vector,
    )
    values = [wanted[i] for i in numbers]
    slow = [(v - mean(values)) / math.sqrt(deviation(values) ** 2 + 1e-8) for v in values]
    np.testing.assert_allclose(judged.advantages, slow, rtol=1e-9, atol=1e-12)


def test_one_part_of_weight_one_is_the_reward_itself() -> None:
    outcomes = Outcomes.of(over_the_wire())
    alone = algorithm_of(type="grpo", parts={"em": 1.0}).advantages(outcomes)
    np.testing.assert_array_equal(alone, algorithm_of(type="grpo").advantages(outcomes.part("em")))


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="'exact'"):
        algorithm_of(type="grpo", parts={"exact": 1.0}).advantages(Outcomes.of(over_the_wire()))
    for given, words in (
        ({"type": "grpo", "turns": "turn"}, "cannot be combined with turns"),
        ({"type": "dapo", "overlong_length": 100}, "overlong_length"),
    ):
        with pytest.raises(ValidationError, match=words):
            algorithm_of(parts=WEIGHTS, **given)


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [("none", [0.25, 0.5, 1.0, 0.0, 0.3, 0.2, 0.4]), ("group", [0.125, 0.25, 0.5, 0.0, -0.05, -0.5, -0.2])],
)
def test_reinforce_pp_discounts_rewards_and_gives_its_baseline_to_the_last_token(
    baseline: str, wanted: list[float]
) -> None:
    """Rewards 1, 0.2 + 0.2 and 0.4: by `group` they are centred to 0.5, -0.3 and -0.2. One token is a dummy."""
    algorithm = algorithm_of(type="reinforce_pp", baseline=baseline, gamma=0.5, whiten=False, kl={"coefficient": 0.0})
    rewards = torch.tensor([0.0, 0.0, 1.0, 7.0, 0.2, 0.2, 0.4], dtype=torch.float64)
    centred = torch.tensor([0.5, 0.5, 0.5, 3.0, -0.3, -0.3, -0.2], dtype=torch.float64)
    mask, number = torch.tensor([True] * 3 + [False] + [True] * 3), torch.tensor([4, 4, 4, -1, 1, 1, 9])
    scores = TokenScores(rewards, centred, rewards, None, None, None, mask, number, torch.zeros_like(number))
    (found,), _ = algorithm.compute_advantages([scores], lambda vector: vector)
    assert found.advantages.tolist() == pytest.approx(wanted)
    voters = np.ones(4, bool)
    outcomes = Outcomes(np.array([1.0, 0.0, 3.0, 1.0]), voters, np.array([0, 0, 1, 1]))
    each = {"none": [1, 0, 3, 1], "group": [0.5, -0.5, 1, -1]}[baseline]
    assert algorithm.advantages(outcomes).tolist() == pytest.approx(each)


def test_gpgs_alpha_counts_the_trajectories_of_groups_whose_rewards_differ() -> None:
    """11 voters: 9 in groups whose rewards differ, 10 with a reward (of which the one without one is made here)."""
    groups = over_the_wire()
    rewards = [[t.reward for t in g.trajectories if t.status.is_valid] for g in groups]
    assert sum(map(len, rewards)) == 11
    outcomes = Outcomes.of(groups)
    outcomes.rewards[1] = rewards[0][1] = 0.0
    slow = []
    for group, voting in zip(GROUPS, rewards, strict=True):
        each = iter([11 / 9 * (r - mean(voting)) if max(voting) > min(voting) else 0.0 for r in voting])
        slow += [0.0 if t is None else next(each) for t in group]
    np.testing.assert_allclose(algorithm_of(type="gpg").advantages(outcomes), slow, atol=1e-12)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_have_mean_one_over_tokens_or_over_trajectories(level: str, mode: str) -> None:
    """verl's `rollout_is_batch_normalize` and slime's: at sequence level the mean is over sequences. Loss: -A log p."""
    lengths, low, high = (2, 9, 4), 0.3, 1.5
    n = sum(lengths)
    draw = torch.Generator().manual_seed(4)
    behaviour, gap, gain, share = (torch.randn(n, generator=draw, dtype=torch.float64) for _ in range(4))
    behaviour, old = -1 - behaviour.abs(), -1 - behaviour.abs() + 0.25 * gap
    number = torch.tensor([9, 9, *[-2] * 9, *[5] * 4])
    mask = torch.ones(n, dtype=torch.bool)
    mask[[0, 5]] = False
    for tensor in (behaviour, old, gain, share):
        tensor[~mask] = math.nan
    weights: dict[int, list[float]] = {}
    for key in (9, -2, 5):
        logs = [float(old[i] - behaviour[i]) for i in range(n) if mask[i] and number[i] == key]
        logs = {"token": logs, "sequence": [sum(logs)] * len(logs), "geometric": [mean(logs)] * len(logs)}[level]
        ratios = [math.exp(x) for x in logs]
        weights[key] = (
            [min(max(r, low), high) for r in ratios]
            if mode == "truncate"
            else [r if low <= r <= high else 0.0 for r in ratios]
        )
    everything = [w for each in weights.values() for w in (each if level == "token" else each[:1])]
    wanted = iter([w / mean(everything) for key in (9, -2, 5) for w in weights[key]])
    correction = {"mode": mode, "level": level, "low": low, "high": high, "normalize": True}
    algorithm = algorithm_of(type="reinforce", old_logprobs="recompute", correction=correction)
    parts = [slice(0, 2), slice(2, n)]
    zeros = torch.zeros(n, dtype=torch.int64)
    scored = [
        TokenScores(gain[p], gain[p], behaviour[p], old[p], None, None, mask[p], number[p], zeros[p]) for p in parts
    ]
    algorithm.compute_advantages(scored, lambda vector: vector)
    slope = []
    for p in parts:
        leaf = old[p].clone().requires_grad_()
        given = {"entropy": gain, "behaviour": behaviour, "old": old, "advantages": gain, "token_weights": share}
        given |= {"mask": mask, "trajectory": number, "lags": zeros, "turn": zeros, "answer": gain}
        algorithm.loss(
            TokenInputs(logprobs=leaf, reference=None, **{k: v[p] for k, v in given.items()})
        ).loss.backward()
        slope += leaf.grad.tolist()
    slow = [-float(gain[i] * share[i]) * next(wanted) if mask[i] else 0.0 for i in range(n)]
    assert slope == pytest.approx(slow, rel=1e-9, abs=1e-12)


def test_distillation_needs_a_teacher_and_something_to_minimise() -> None:
    with pytest.raises(ValidationError, match=r"reference\.model"):
        TrainerSettings.model_validate({"algorithm": {"type": "distill"}})
    assert TrainerSettings.model_validate({"algorithm": {"type": "distill"}, "reference": {"model": "teacher"}})
    with pytest.raises(ValidationError, match="coefficient"):
        algorithm_of(type="distill", kl={"coefficient": 0.0})
