"""Invariants of every algorithm in the union."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs, TokenScores, TopTokens
from learner.config.algorithm import AlgorithmSettings, GrpoSettings
from learner.config.learner import TrainerSettings
from protocol.errors import UserError
from protocol.runtime.config import section

MEMBERS = [get_args(member)[0] for member in get_args(get_args(AlgorithmSettings)[0])]
N = 10


@pytest.fixture(params=MEMBERS, ids=lambda member: member.__name__)
def settings(request):
    return request.param(kl={"coefficient": 0.1}, entropy_coefficient=0.01)


@pytest.fixture(params=MEMBERS, ids=lambda member: member.__name__)
def recomputing(request):
    """Every correction that needs the proximal policy, at once."""
    given = {"old_logprobs": "recompute", "correction": {"mode": "mask", "low": 0.2, "high": 3, "normalize": True}}
    also = [{"measure": "k3", "level": "mean", "high": 2}, {"level": "max", "high": 20, "low": 0}]
    rejection = {"level": "token", "low": 0.1, "high": 9, "also": also, "second_moment": 0.3, "veto": 0.01}
    return request.param(**given, rejection=rejection | {"off_policy": 0.5}, dual_clip=3, drift_coefficient=0.1)


def outcomes(order: np.ndarray | None = None) -> Outcomes:
    rewards = np.array([1.0, 0.0, 0.5, 0.3, 0.3, 1.0, 0.0, 9.0])
    valid = np.array([True] * 7 + [False])
    group = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    order = np.arange(8) if order is None else order
    return Outcomes(rewards[order], valid[order], group[order])


def tokens(n: int = N) -> TokenInputs:
    generator = torch.Generator().manual_seed(0)
    behaviour, noise, entropy, weights = (torch.rand(n, generator=generator) for _ in range(4))
    head = torch.log_softmax(torch.randn(n, 5, generator=generator), -1)[:, :2]
    return TokenInputs(
        logprobs=(-behaviour + noise - 0.5).requires_grad_(),
        entropy=entropy.requires_grad_(),
        behaviour=-behaviour,
        old=-behaviour,
        reference=-behaviour + 0.1,
        advantages=noise - 0.5,
        token_weights=weights / n,
        mask=torch.ones(n, dtype=torch.bool),
        trajectory=torch.arange(n) // 3,
        lags=torch.arange(n) % 3,
        turn=torch.arange(n) % 3,
        answer=torch.where(torch.arange(n) % 3 == 2, 1.5, -1.0),
        top=TopTokens(head, head - 0.1, torch.arange(n) % 2 == 0),
    )


def part(x: TokenInputs, where: slice) -> TokenInputs:
    fields = {name: getattr(x, name)[where] for name in TokenInputs.__dataclass_fields__ if name != "top"}
    leaves = {name: fields[name].detach().requires_grad_() for name in ("logprobs", "entropy")}
    assert x.top is not None
    top = TopTokens(*(getattr(x.top, name)[where] for name in TopTokens.__dataclass_fields__))
    return TokenInputs(**fields | leaves, top=top)


def scored(n: int = N) -> TokenScores:
    generator = torch.Generator().manual_seed(1)
    behaviour, noise, values, advantages = (torch.rand(n, generator=generator) for _ in range(4))
    trajectory = torch.arange(n) // 3
    last = torch.cat([trajectory[1:] != trajectory[:-1], torch.tensor([True])])
    return TokenScores(
        rewards=last * (trajectory % 2).float(),
        advantages=advantages - 0.5,
        behaviour=-behaviour,
        old=-behaviour + noise - 0.5,
        reference=-behaviour - 0.2,
        values=values,
        mask=torch.ones(n, dtype=torch.bool),
        trajectory=trajectory,
        turn=torch.zeros(n, dtype=torch.int64),
        last_values=(trajectory % 2) * 0.7,
    )


def scored_part(x: TokenScores, where: slice) -> TokenScores:
    return TokenScores(**{name: getattr(x, name)[where] for name in TokenScores.__dataclass_fields__})


def alone(vector: torch.Tensor) -> torch.Tensor:
    return vector


def test_there_is_more_than_one_algorithm():
    assert len(MEMBERS) >= 16


def test_advantages_are_finite_and_zero_for_invalid_trajectories(settings):
    found = build_algorithm(settings).advantages(outcomes())
    assert found.shape == (8,)
    assert np.isfinite(found).all()
    assert found[7] == 0
    assert found[0] > found[1]


def test_advantages_follow_their_trajectory_in_any_order(settings):
    order = np.array([5, 2, 7, 0, 4, 6, 1, 3])
    algorithm = build_algorithm(settings)
    np.testing.assert_allclose(algorithm.advantages(outcomes(order)), algorithm.advantages(outcomes())[order])


@pytest.mark.parametrize("baseline", ["none", "batch", "group"])
def test_the_settings_say_whether_groups_of_one_train_on_nothing(settings, baseline):
    fields = type(settings).model_fields
    if "baseline" in fields and baseline in get_args(fields["baseline"].annotation):
        settings = settings.model_copy(update={"baseline": baseline})
    alone = Outcomes(np.array([1.0, 0.0, 0.5]), np.ones(3, bool), np.arange(3))
    assert settings.group_baseline == (not build_algorithm(settings).advantages(alone).any())


def test_the_loss_is_a_scalar_with_a_gradient(settings):
    x = tokens()
    out = build_algorithm(settings).loss(x)
    out.loss.backward()
    assert out.loss.shape == ()
    assert x.logprobs.grad.abs().sum() > 0
    pairs = [x for pair in out.ratios.values() for x in pair]
    assert all(x.shape == () and not x.requires_grad for x in [*out.sums.values(), *out.maxima.values(), *pairs])


def test_losses_and_metrics_of_parts_add_up(settings):
    algorithm, x = build_algorithm(settings), tokens()
    whole = algorithm.loss(x)
    # a trajectory is never cut
    parts = [algorithm.loss(part(x, slice(*cut))) for cut in ((0, 3), (3, 6), (6, N))]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts).float(), value.float())
    for name, value in whole.maxima.items():
        torch.testing.assert_close(torch.stack([p.maxima[name] for p in parts]).max(), value)
    for name, (above, below) in whole.ratios.items():
        torch.testing.assert_close(sum(p.ratios[name][0] for p in parts).float(), above.float())
        assert sum(p.ratios[name][1] for p in parts) == below


def test_judgements_do_not_depend_on_the_cut(settings):
    whole, _ = build_algorithm(settings).compute_advantages([scored()], alone)
    parts, _ = build_algorithm(settings).compute_advantages(
        [scored_part(scored(), slice(*cut)) for cut in ((0, 3), (3, 6), (6, N))], alone
    )
    torch.testing.assert_close(torch.cat([p.advantages for p in parts]), whole[0].advantages)
    if whole[0].returns is not None:
        torch.testing.assert_close(torch.cat([p.returns for p in parts]), whole[0].returns)


def test_what_needs_values_returns_what_they_should_have_been(settings):
    algorithm = build_algorithm(settings)
    (judged,), _ = algorithm.compute_advantages([scored()], alone)
    assert (judged.returns is not None) == algorithm.requirements.values


def test_corrections_leave_a_finite_loss(recomputing):
    algorithm = build_algorithm(recomputing)
    assert algorithm.requirements.old
    algorithm.compute_advantages([scored()], alone)
    x = tokens()
    out = algorithm.loss(replace(x, old=x.behaviour + 0.3))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(x.logprobs.grad).all()


def test_state_goes_through_json(settings):
    algorithm = build_algorithm(settings)
    before = json.loads(json.dumps(algorithm.state()))
    algorithm.compute_advantages([scored()], alone)
    algorithm.load(before)
    assert algorithm.state() == before


def test_a_dummy_adds_nothing_and_names_the_same_metrics(settings):
    algorithm = build_algorithm(settings)
    x = replace(part(tokens(), slice(0, 1)), mask=torch.tensor([False]), token_weights=torch.zeros(1))
    out = algorithm.loss(x)
    out.loss.backward()
    assert out.loss.item() == 0
    assert x.logprobs.grad.tolist() == [0.0]
    real = algorithm.loss(tokens())
    assert list(out.sums) == list(real.sums)
    assert list(out.maxima) == list(real.maxima)
    assert all(value.item() == 0 for value in out.sums.values())


def test_a_micro_batch_without_a_token_adds_nothing(settings):
    algorithm = build_algorithm(settings)
    judged, _ = algorithm.compute_advantages([scored_part(scored(), slice(0, 0)), scored()], alone)
    assert judged[0].advantages.shape == (0,)
    x = part(tokens(), slice(0, 0))
    out = algorithm.loss(x)
    out.loss.backward()
    assert out.loss.item() == 0 and x.logprobs.grad.shape == (0,)
    real = algorithm.loss(tokens())
    for name in ("sums", "maxima", "ratios"):
        assert list(getattr(out, name)) == list(getattr(real, name))
    assert not any([*out.sums.values(), *out.maxima.values()])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_tokens_leak_nothing(settings, bad):
    clean, x = tokens(), tokens()
    mask = torch.ones(N, dtype=torch.bool)
    mask[4] = False
    spoiled = {name: getattr(x, name).detach().clone() for name in ("logprobs", "entropy", "behaviour", "advantages")}
    for tensor in spoiled.values():
        tensor[4] = bad
    weights = clean.token_weights.clone()
    weights[4] = 0
    logprobs = spoiled.pop("logprobs").requires_grad_()
    out = build_algorithm(settings).loss(
        replace(x, **spoiled, logprobs=logprobs, old=spoiled["behaviour"], mask=mask, token_weights=weights)
    )
    out.loss.backward()
    expected = build_algorithm(settings).loss(replace(clean, mask=mask, token_weights=weights))
    torch.testing.assert_close(out.loss, expected.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[4] == 0
    assert all(torch.isfinite(value) for value in (out.sums | out.maxima).values())


def test_the_settings_are_found_by_their_type(settings):
    tree = {"learner": {"algorithm": settings.model_dump(), "reference": {"model": "teacher"}}}
    assert section(tree, "learner", TrainerSettings).algorithm == settings


def test_without_a_type_it_is_grpo():
    assert section(
        {"learner": {"algorithm": {"clip_high": 0.3}}}, "learner", TrainerSettings
    ).algorithm == GrpoSettings(clip_high=0.3)


def test_a_misspelt_setting_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="clip_high"):
        section({"learner": {"algorithm": {"clip_hihg": 0.3}}}, "learner", TrainerSettings)


def test_bfloat16_without_zero_is_refused():
    with pytest.raises(UserError, match="zero_stage"):
        section({"learner": {"model": {"dtype": "bfloat16"}}}, "learner", TrainerSettings)
