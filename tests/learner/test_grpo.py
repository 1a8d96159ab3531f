"""GRPO's whole loss against a loop in plain Python, gradients included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.algorithms import build_algorithm
from learner.algorithms.base import TokenInputs, TokenScores
from learner.algorithms.grpo import EPSILON
from learner.config.algorithm import GrpoSettings
from learner.config.learner import BatchSettings
from learner.data.batch import build_batch
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment


def inputs(n: int = 12, *, seed: int = 0, dtype=torch.float64, **given) -> TokenInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.rand(n, generator=generator, dtype=dtype)

    behaviour = -3 * draw()
    tensors = {
        "logprobs": behaviour + draw() - 0.5,
        "entropy": draw(),
        "behaviour": behaviour,
        "old": behaviour,
        "reference": behaviour + draw() - 0.5,
        "advantages": 2 * draw() - 1,
        "token_weights": draw() / n,
        "mask": torch.ones(n, dtype=torch.bool),
        "trajectory": torch.arange(n) // 4,
        "lags": torch.zeros(n, dtype=torch.int64),
        "turn": torch.zeros(n, dtype=torch.int64),
        "answer": torch.full((n,), -1.0, dtype=dtype),
    } | given
    tensors["logprobs"] = tensors["logprobs"].detach().clone().requires_grad_()
    tensors["entropy"] = tensors["entropy"].detach().clone().requires_grad_()
    return TokenInputs(**tensors)


def slow_importance(x: TokenInputs, s: GrpoSettings) -> list[float]:
    """Importance weight of each token: truncated (TIS) or masked (MIS), then divided by its mean if so set."""
    c = s.correction
    ratios = [math.exp(old - b) for old, b in zip(x.old.tolist(), x.behaviour.tolist(), strict=True)]
    if s.old_logprobs != "recompute" or c.mode == "off":
        return [1.0] * len(ratios)
    if c.mode == "mask":
        found = [r if c.low <= r <= c.high else 0.0 for r in ratios]
    else:
        found = [min(max(r, c.low), c.high) for r in ratios]
    mean = sum(found) / len(found) if c.normalize else 1.0
    return [f / mean for f in found]


def as_scored(x: TokenInputs) -> TokenScores:
    """The same tokens before the update, as `compute_advantages` takes them."""
    n = len(x.behaviour)
    nothing, turn = torch.zeros(n, dtype=x.behaviour.dtype), torch.zeros(n, dtype=torch.int64)
    return TokenScores(nothing, x.advantages, x.behaviour, x.old, x.reference, None, x.mask, x.trajectory, turn)


def slow(x: TokenInputs, s: GrpoSettings) -> tuple[float, list[float], list[float]]:
    """Loss, gradient to log-probs, gradient to entropies; one token at a time, derivatives derived manually."""
    total, to_logprobs, to_entropy = 0.0, [], []
    columns = [t.tolist() for t in (x.logprobs, x.entropy, x.old, x.reference, x.advantages, x.token_weights)]
    for lp, h, old, ref, a, w, iw in zip(*columns, slow_importance(x, s), strict=True):
        ratio = math.exp(lp - old)
        bounded = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
        value = iw * max(-a * ratio, -a * bounded)
        slope = iw * (-a * ratio if -a * ratio >= -a * bounded else 0.0)
        if s.dual_clip and a < 0 and ratio > s.dual_clip:
            value, slope = iw * -a * s.dual_clip, 0.0
        k3 = math.exp(ref - lp) - (ref - lp) - 1
        total += w * (value + s.kl.coefficient * k3 - s.entropy_coefficient * h)
        to_logprobs.append(w * (slope + s.kl.coefficient * (1 - math.exp(ref - lp))))
        to_entropy.append(-w * s.entropy_coefficient)
    return total, to_logprobs, to_entropy


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.1},
        {"dual_clip": 0, "old_logprobs": "recompute"},
        {"kl": {"coefficient": 0.3}},
        {"entropy_coefficient": 0.2, "kl": {"coefficient": 0.1}},
        {"old_logprobs": "recompute", "correction": {"high": 1.1}},
        {"old_logprobs": "recompute", "correction": {"mode": "off"}},
        {"old_logprobs": "recompute", "correction": {"mode": "mask", "low": 0.4, "high": 1.5}},
        {"old_logprobs": "recompute", "correction": {"high": 1.1, "normalize": True}},
        {"old_logprobs": "recompute", "correction": {"mode": "mask", "low": 0.4, "high": 1.5, "normalize": True}},
    ],
)
def test_the_loss_is_that_of_a_slow_loop(settings):
    s = GrpoSettings(**settings)
    x = inputs(old=inputs(seed=5).behaviour - 0.7) if s.old_logprobs == "recompute" else inputs()
    algorithm = build_algorithm(s)
    algorithm.compute_advantages([as_scored(x)], lambda vector: vector)
    out = algorithm.loss(x)
    out.loss.backward()
    total, to_logprobs, to_entropy = slow(x, s)
    assert out.loss.item() == pytest.approx(total, rel=1e-9)
    assert x.logprobs.grad.tolist() == pytest.approx(to_logprobs, rel=1e-9, abs=1e-12)
    if s.entropy_coefficient:
        assert x.entropy.grad.tolist() == pytest.approx(to_entropy, rel=1e-9)


def test_the_default_correction_truncates_importance_weights_at_two():
    """TIS with C = 2, the value of verl and slime: a weight of 9 counts as 2, one of 1/9 as it is."""
    behaviour = torch.log(torch.tensor([0.1, 0.9], dtype=torch.float64))
    old = torch.log(torch.tensor([0.9, 0.1], dtype=torch.float64))
    x = inputs(2, behaviour=behaviour, old=old, logprobs=old, advantages=torch.ones(2, dtype=torch.float64))
    build_algorithm(GrpoSettings(old_logprobs="recompute")).loss(x).loss.backward()
    assert (-x.logprobs.grad / x.token_weights).tolist() == pytest.approx([2, 1 / 9])


def test_by_default_ratios_are_clipped_at_0_8_and_1_28():
    """DAPO's clip-higher (arXiv 2503.14476). Beyond the bound a token that gains has no gradient any more."""
    ratios = torch.tensor([1.27, 1.29, 0.81, 0.79], dtype=torch.float64)
    old = torch.full((4,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    x = inputs(4, behaviour=old, old=old, logprobs=old + ratios.log(), advantages=advantages)
    build_algorithm(GrpoSettings()).loss(x).loss.backward()
    assert (-x.logprobs.grad / x.token_weights).tolist() == pytest.approx([1.27, 0, -0.81, 0])


def test_by_default_a_token_that_loses_is_clipped_at_3():
    """The dual clip (arXiv 1912.09729), with verl's bound."""
    ratios = torch.tensor([2.9, 3.1, 3.1], dtype=torch.float64)
    old = torch.full((3,), -4.0, dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    x = inputs(3, behaviour=old, old=old, logprobs=old + ratios.log(), advantages=advantages)
    out = build_algorithm(GrpoSettings()).loss(x)
    out.loss.backward()
    assert (-x.logprobs.grad / x.token_weights).tolist() == pytest.approx([-2.9, 0, 0])
    assert out.sums["clip_dual"].item() == 1


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped():
    behaviour = inputs().behaviour
    out = build_algorithm(GrpoSettings()).loss(inputs(logprobs=behaviour))
    n = len(behaviour)
    assert out.sums["ratio_mean"].item() == n
    assert out.sums["clip_fraction"].item() == 0
    assert out.sums["kl_behaviour"].item() == 0
    assert out.sums["logprob_gap"].item() == 0
    assert out.maxima["ratio_max"].item() == 1


def test_on_policy_the_gradient_is_that_of_reinforce():
    x = inputs(logprobs=inputs().behaviour)
    build_algorithm(GrpoSettings()).loss(x).loss.backward()
    torch.testing.assert_close(x.logprobs.grad, -x.token_weights * x.advantages)


def test_without_advantages_there_is_no_gradient():
    x = inputs(advantages=torch.zeros(12, dtype=torch.float64))
    out = build_algorithm(GrpoSettings()).loss(x)
    out.loss.backward()
    assert out.loss.item() == 0
    assert x.logprobs.grad.tolist() == [0.0] * 12


def test_the_metrics_leave_masked_tokens_out_and_go_by_advantage_turn_and_lag():
    """Ratios 1, 1.5 (clipped above), 0.4 (below), 1, 4 (clipped dually, and rejected), and a token that is masked."""
    nan = math.nan
    ratios = torch.tensor([1.0, 1.5, 0.4, 1.0, 4.0, nan], dtype=torch.float64)
    behaviour = torch.tensor([-2.0, -2.0, -2.0, -2.0, -2.0, nan], dtype=torch.float64)
    x = inputs(
        6,
        behaviour=behaviour,
        old=behaviour,
        logprobs=behaviour + ratios.log(),
        entropy=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, nan], dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, nan], dtype=torch.float64),
        mask=torch.tensor([True, True, True, True, True, False]),
        lags=torch.tensor([0, 1, 2, 3, 7, 0]),
        turn=torch.tensor([0, 0, 1, 5, 0, 0]),
        answer=torch.tensor([-1.0, -1, -1, 0, 2, 2], dtype=torch.float64),
        reference=None,
    )
    out = build_algorithm(GrpoSettings(rejection={"level": "token", "low": 0.3, "high": 3.5})).loss(x)
    logs = (behaviour + ratios.log()).tolist()
    assert {name: value.item() for name, value in out.sums.items()} == pytest.approx(
        {
            "clip_fraction": 2,
            "clip_low": 1,
            "clip_high": 1,
            "clip_dual": 1,
            "ratio_mean": 7.9,
            "ratio_square": 1 + 2.25 + 0.16 + 1 + 16,
            "ratio_low": 1,
            "ratio_high": 1,
            "entropy": 1.5,
            "kl_behaviour": sum(r - math.log(r) - 1 for r in (1.5, 0.4, 4.0)),
            "logprob_gap": math.log(1.5) + math.log(2.5) + math.log(4),
            "rejected": 1,
            "weight_mean": 4,
        }
    )
    assert {name: value.item() for name, value in out.maxima.items()} == pytest.approx(
        {"ratio_max": 4, "logprob_gap_max": math.log(4)}
    )
    found = {name: (total.item(), count.item()) for name, (total, count) in out.ratios.items()}
    each = {f"{name}_{number}" for name in ("loss_lag", "logprob_right_turn") for number in range(4)}
    assert found.keys() == {"logprob_right", "logprob_wrong", "entropy_answer", "entropy_search"} | each
    # the advantages of the first trajectory, of four tokens, have the mean 0.5; the second one has -1
    assert found["logprob_right"] == pytest.approx((sum(logs[:4]), 4))
    assert found["logprob_wrong"] == pytest.approx((logs[4], 1))
    turns = [found[f"logprob_right_turn_{number}"] for number in range(4)]
    assert turns == [pytest.approx(pair) for pair in ((sum(logs[:2]), 2), (logs[2], 1), (0, 0), (logs[3], 1))]
    assert found["entropy_answer"] == pytest.approx((0.9, 2)) and found["entropy_search"] == pytest.approx((0.6, 3))
    losses = [found[f"loss_lag_{age}"] for age in range(4)]
    assert losses == [pytest.approx(pair) for pair in ((-1, 1), (-1.28, 1), (0.8, 1), (-1, 2))], "lag 7 counts as 3"


def test_a_micro_batch_without_tokens_has_metrics_of_zero():
    out = build_algorithm(GrpoSettings()).loss(inputs(0))
    assert {value.item() for value in (*out.sums.values(), *out.maxima.values())} == {0}
    assert {(total.item(), count.item()) for total, count in out.ratios.values()} == {(0, 0)}


def test_the_metrics_are_sums_over_tokens():
    behaviour = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    logprobs = torch.log(torch.tensor([0.75, 0.25], dtype=torch.float64))
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    x = inputs(2, behaviour=behaviour, old=behaviour, logprobs=logprobs, advantages=advantages)
    out = build_algorithm(GrpoSettings()).loss(x)
    assert out.sums["clip_fraction"].item() == 2
    assert out.sums["ratio_mean"].item() == pytest.approx(1.5 + 0.5)
    assert out.maxima["ratio_max"].item() == pytest.approx(1.5)
    k3 = (1.5 - math.log(1.5) - 1) + (0.5 - math.log(0.5) - 1)  # of behaviour against trainer
    assert out.sums["kl_behaviour"].item() == pytest.approx(k3)
    assert out.maxima["logprob_gap_max"].item() == pytest.approx(math.log(2))
    assert out.sums["entropy"].item() == pytest.approx(x.entropy.sum().item())


def test_a_reference_is_required_only_if_it_has_a_weight():
    assert not build_algorithm(GrpoSettings()).requirements.reference
    assert build_algorithm(GrpoSettings(kl={"coefficient": 0.01})).requirements.reference
    assert not build_algorithm(GrpoSettings()).requirements.entropy_gradient
    assert build_algorithm(GrpoSettings(entropy_coefficient=0.01)).requirements.entropy_gradient


def groups() -> list[TrajectoryGroup]:
    rng = np.random.default_rng(3)

    def trajectory(status: Status) -> Trajectory:
        b, d = (policy_segment(rng.integers(1, 50, n), (-rng.random(n)).tolist()) for n in rng.integers(1, 12, 2))
        segments = (prompt_segment([1, 2]), b, observation_segment([3, 4]), d)
        return Trajectory(status=status, segments=segments, reward=float(rng.random()))

    ends = (Status.ANSWERED, Status.ANSWERED, Status.FAILED, Status.TRUNCATED)
    return [
        TrajectoryGroup(run="t", seq=s, question=make_question(s), trajectories=tuple(map(trajectory, ends)))
        for s in range(1, 6)
    ]


def batch_loss(settings: GrpoSettings, **layout: int) -> tuple[float, dict[tuple[int, int], float]]:
    """Loss of the batch and its gradient to the log-prob of each trained token, for a policy made up per token."""
    algorithm = build_algorithm(settings)
    batch = build_batch(
        groups(),
        algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=0,
        settings=BatchSettings(**layout),
        temperature=1.0,
    )
    total, gradients = 0.0, {}
    for m in batch.micro_batches:
        behaviour = torch.from_numpy(m.behaviour).double()
        keys = list(zip(m.trajectory.tolist(), m.positions.flat[m.index].tolist(), strict=True))
        drift = torch.tensor([math.sin(7.0 * a + 3.0 * b) / 2 for a, b in keys])
        x = inputs(
            len(keys),
            behaviour=behaviour,
            old=behaviour,
            logprobs=behaviour + drift,
            reference=None,
            advantages=torch.from_numpy(m.advantages).double(),
            token_weights=torch.from_numpy(m.token_weights).double(),
        )
        out = algorithm.loss(x)
        out.loss.backward()
        total += out.loss.item()
        gradients.update(zip(keys, x.logprobs.grad.tolist(), strict=True))
    return total, gradients


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(aggregation):
    settings = GrpoSettings(aggregation=aggregation, aggregation_length=64)
    whole, gradients = batch_loss(settings)
    layouts = ({"micro_batch_tokens": 1}, {"micro_batch_tokens": 60}, {"row_tokens": 40, "micro_batch_tokens": 80})
    for layout in (*layouts, {"share_prompts": True}):
        total, cut = batch_loss(settings, **layout)
        assert total == pytest.approx(whole, rel=1e-6)
        assert cut == pytest.approx(gradients, rel=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_loss_of_a_batch_is_that_of_a_slow_loop_over_groups(aggregation):
    s = GrpoSettings(aggregation=aggregation, aggregation_length=64)
    losses: list[list[float]] = []
    number = -1
    for group in groups():
        voters = [t.reward for t in group.trajectories if t.status.is_valid]
        mean = sum(voters) / len(voters)
        std = math.sqrt(sum((r - mean) ** 2 for r in voters) / (len(voters) - 1))
        for t in group.trajectories:
            number += 1
            if not t.status.is_valid:
                continue
            a = (t.reward - mean) / (std + EPSILON)
            tokens = []
            for at in np.flatnonzero(t.mask).tolist():
                ratio = math.exp(math.sin(7.0 * number + 3.0 * (at - 1)) / 2)
                tokens.append(max(-a * ratio, -a * min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)))
            losses.append(tokens)
    expected = {
        "token_mean": sum(map(sum, losses)) / sum(map(len, losses)),
        "seq_mean_token_mean": sum(sum(x) / len(x) for x in losses) / len(losses),
        "seq_mean_token_sum": sum(sum(x) / 64 for x in losses) / len(losses),
    }[aggregation]
    assert batch_loss(s)[0] == pytest.approx(expected, rel=1e-5)
