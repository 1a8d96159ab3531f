"""What every algorithm of the union must keep, whatever it does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from learner.advantages import Outcomes
from learner.algorithms.base import TokenInputs
from learner.config_algorithm import AlgorithmSettings, GrpoSettings
from learner.config_trainer import TrainerSettings
from protocol.errors import UserError
from protocol.settings import section

MEMBERS = [get_args(member)[0] for member in get_args(get_args(AlgorithmSettings)[0])]
N = 10


@pytest.fixture(params=MEMBERS, ids=lambda member: member.__name__)
def settings(request):
    return request.param(kl_coefficient=0.1, entropy_coefficient=0.01)


def outcomes(order: np.ndarray | None = None) -> Outcomes:
    rewards = np.array([1.0, 0.0, 0.5, 0.3, 0.3, 1.0, 0.0, 9.0])
    votes = np.array([True] * 7 + [False])
    group = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    order = np.arange(8) if order is None else order
    return Outcomes(rewards[order], votes[order], group[order])


def tokens(n: int = N) -> TokenInputs:
    generator = torch.Generator().manual_seed(0)
    behaviour, noise, entropy, weights = (torch.rand(n, generator=generator) for _ in range(4))
    return TokenInputs(
        logprobs=(-behaviour + noise - 0.5).requires_grad_(),
        entropy=entropy.requires_grad_(),
        behaviour=-behaviour,
        old=-behaviour,
        reference=-behaviour + 0.1,
        advantages=noise - 0.5,
        weights=weights / n,
        mask=torch.ones(n, dtype=torch.bool),
        trajectory=torch.arange(n) // 3,
    )


def part(x: TokenInputs, where: slice) -> TokenInputs:
    fields = {name: getattr(x, name)[where] for name in TokenInputs.__dataclass_fields__}
    leaves = {name: fields[name].detach().requires_grad_() for name in ("logprobs", "entropy")}
    return TokenInputs(**fields | leaves)


def test_there_is_more_than_one_algorithm():
    assert len(MEMBERS) >= 2


def test_advantages_are_finite_and_who_does_not_vote_has_none(settings):
    found = settings.build().advantages(outcomes())
    assert found.shape == (8,)
    assert np.isfinite(found).all()
    assert found[7] == 0
    assert found[0] > 0 > found[1]


def test_advantages_follow_their_trajectory_in_any_order(settings):
    order = np.array([5, 2, 7, 0, 4, 6, 1, 3])
    algorithm = settings.build()
    np.testing.assert_allclose(algorithm.advantages(outcomes(order)), algorithm.advantages(outcomes())[order])


def test_the_loss_is_a_scalar_with_a_gradient(settings):
    x = tokens()
    out = settings.build().loss(x)
    out.loss.backward()
    assert out.loss.shape == ()
    assert x.logprobs.grad.abs().sum() > 0
    assert all(value.shape == () and not value.requires_grad for value in (out.sums | out.maxima).values())


def test_losses_and_metrics_of_parts_add_up(settings):
    algorithm, x = settings.build(), tokens()
    whole = algorithm.loss(x)
    parts = [algorithm.loss(part(x, slice(*cut))) for cut in ((0, 3), (3, 4), (4, N))]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts).float(), value.float())
    for name, value in whole.maxima.items():
        torch.testing.assert_close(torch.stack([p.maxima[name] for p in parts]).max(), value)


def test_a_dummy_adds_nothing_and_names_the_same_metrics(settings):
    algorithm = settings.build()
    x = replace(part(tokens(), slice(0, 1)), mask=torch.tensor([False]), weights=torch.zeros(1))
    out = algorithm.loss(x)
    out.loss.backward()
    assert out.loss.item() == 0
    assert x.logprobs.grad.tolist() == [0.0]
    real = algorithm.loss(tokens())
    assert list(out.sums) == list(real.sums)
    assert list(out.maxima) == list(real.maxima)
    assert all(value.item() == 0 for value in out.sums.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_tokens_leak_nothing(settings, bad):
    clean, x = tokens(), tokens()
    mask = torch.ones(N, dtype=torch.bool)
    mask[4] = False
    spoiled = {name: getattr(x, name).detach().clone() for name in ("logprobs", "entropy", "behaviour", "advantages")}
    for tensor in spoiled.values():
        tensor[4] = bad
    weights = clean.weights.clone()
    weights[4] = 0
    logprobs = spoiled.pop("logprobs").requires_grad_()
    out = settings.build().loss(
        replace(x, **spoiled, logprobs=logprobs, old=spoiled["behaviour"], mask=mask, weights=weights)
    )
    out.loss.backward()
    expected = settings.build().loss(replace(clean, mask=mask, weights=weights))
    torch.testing.assert_close(out.loss, expected.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[4] == 0
    assert all(torch.isfinite(value) for value in (out.sums | out.maxima).values())


def test_the_settings_are_found_by_their_type(settings):
    tree = {"learner": {"algorithm": settings.model_dump()}}
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
