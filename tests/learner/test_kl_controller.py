"""Controllers of the divergence's weight, and the divergence as part of the reward."""

from __future__ import annotations

import json
import math

import pytest
import torch

from learner.algorithms.kl import AdaptiveKl, FixedKl, KlController, penalised


def test_a_fixed_weight_stays():
    fixed: KlController = FixedKl(0.001)
    fixed.update(100.0, 512)
    fixed.load(AdaptiveKl(5.0, target=1.0, horizon=1.0).state())
    assert fixed.coefficient == 0.001
    assert fixed.state() == {}


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 512 / 10_000),
        (5.0, 1 + 0.2 * 512 / 10_000),  # clipped
        (0.0, 1 - 0.2 * 512 / 10_000),
        (-3.0, 1 - 0.2 * 512 / 10_000),  # an estimate such as k1 can be negative
    ],
)
def test_the_adaptive_weight_by_hand(kl, factor):
    adaptive: KlController = AdaptiveKl(0.2, target=0.1, horizon=10_000)
    adaptive.update(kl, 512)
    assert adaptive.coefficient == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_adaptive_weight_never_turns_negative():
    adaptive = AdaptiveKl(0.2, target=0.1, horizon=10)
    for _ in range(100):
        adaptive.update(0.0, 512)
    assert adaptive.coefficient == pytest.approx(0.2 * 0.8**100)


def test_the_state_goes_through_json_and_continues_bit_for_bit():
    one = AdaptiveKl(0.1, target=0.05, horizon=1000)
    one.update(0.07, 33)
    two = AdaptiveKl(9.0, target=0.05, horizon=1000)
    two.load(json.loads(json.dumps(one.state())))
    one.update(0.02, 5)
    two.update(0.02, 5)
    assert one.coefficient == two.coefficient


def test_another_controllers_state_is_refused():
    with pytest.raises(KeyError):
        AdaptiveKl(0.1, target=0.1, horizon=10.0).load(FixedKl(1.0).state())


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_divergence_that_is_not_finite_is_refused_and_changes_nothing(kl):
    adaptive = AdaptiveKl(0.1, target=0.1, horizon=10.0)
    with pytest.raises(ValueError, match="divergence"):
        adaptive.update(kl, 8)
    assert adaptive.coefficient == 0.1


@pytest.mark.parametrize(("coefficient", "target", "horizon"), [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0)])
def test_settings_that_cannot_work_are_refused(coefficient, target, horizon):
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKl(coefficient, target=target, horizon=horizon)


def test_the_penalty_is_taken_off_each_token_as_a_constant():
    rewards = torch.tensor([0.0, 0.0, 1.0, math.nan], requires_grad=True)
    kl = torch.tensor([0.5, -0.25, 2.0, math.inf], requires_grad=True)
    found = penalised(rewards, kl, 0.1, torch.tensor([True, True, True, False]))
    assert found.tolist() == pytest.approx([-0.05, 0.025, 0.8, 0.0])
    assert not found.requires_grad
    with pytest.raises(TypeError, match=r"torch\.bool"):
        penalised(rewards, kl, 0.1, torch.ones(4))
