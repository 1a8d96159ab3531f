"""Controllers of the divergence's weight, and the divergence as part of the reward."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from learner.algorithms.base import TokenScores
from learner.algorithms.kl.controller import AdaptiveKl, FixedKl, KlController
from learner.algorithms.kl.estimators import penalised
from tests.learner.test_formulas import algorithm_of


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


def requirements(**settings: Any) -> dict[str, Any]:
    return dataclasses.asdict(algorithm_of(**settings).requirements)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"type": "grpo"}, {}),
        ({"type": "grpo", "kl": {"coefficient": 0.1}}, {"reference": True}),
        ({"type": "reinforce_pp", "kl": {"coefficient": 0.1}}, {"reference": True, "old_for_advantages": True}),
        ({"type": "reinforce_pp", "kl": {"coefficient": 0.1, "place": "loss"}}, {"reference": True}),
        ({"type": "reinforce_pp", "kl": {"coefficient": 0.0}}, {}),
        ({"type": "grpo", "kl": {"coefficient": 0.1, "type": "reverse", "top": 5}}, {"reference": True, "top": 5}),
        (
            {"type": "grpo", "kl": {"coefficient": 0.1, "type": "forward", "top": 5}},
            {"reference": True, "top": 5, "top_of": "reference"},
        ),
        ({"type": "grpo", "kl": {"type": "reverse"}}, {}),
        ({"type": "grpo", "entropy_coefficient": 0.1}, {"entropy_gradient": True}),
        ({"type": "grpo", "entropy_coefficient": -0.1}, {"entropy_gradient": True}),
        ({"type": "grpo", "old_logprobs": "recompute"}, {"old": True}),
        (
            {"type": "grpo", "old_logprobs": "recompute", "correction": {"normalize": True}},
            {"old": True, "old_for_advantages": True},
        ),
        ({"type": "grpo", "rejection": {"second_moment": 0.5}}, {"old_for_advantages": True}),
        ({"type": "ppo"}, {"old": True, "values": True}),
    ],
)
def test_only_what_the_settings_need_is_computed_before_the_loss(settings: Any, needed: Any) -> None:
    nothing = {
        "reference": False, "values": False, "entropy_gradient": False, "old": False, "old_for_advantages": False,
        "top": 0, "top_of": "policy",
    }  # fmt: skip
    if "second_moment" in str(settings):
        settings = settings | {"correction": {"mode": "off"}}
    assert requirements(**settings) == nothing | needed


def batch_of(old: list[float], reference: list[float]) -> TokenScores:
    """Trajectories of two and one tokens, whose outcomes are 1 and 0, and a dummy."""
    number, mask = torch.tensor([3, 3, -1, 8]), torch.tensor([True, True, False, True])
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    given = (torch.tensor(values, dtype=torch.float64) for values in (old, reference))
    return TokenScores(rewards, rewards, rewards, *given, None, mask, number, torch.zeros_like(number))


def test_the_divergence_of_a_batch_is_taken_off_its_rewards_and_moves_the_coefficient_after_its_update() -> None:
    kl = {"coefficient": 0.1, "type": "k1", "target": 0.2, "horizon": 10}
    algorithm = algorithm_of(type="reinforce_pp", whiten=False, kl=kl)
    scores = batch_of([-1.0, -1.0, math.nan, -2.0], [-1.5, -1.25, math.nan, -2.75])
    for _ in range(2):
        (found,), facts = algorithm.compute_advantages([scores], lambda vector: vector)
        assert facts == {"kl_reference": pytest.approx(0.5), "kl_coefficient": 0.1}
        assert found.advantages.tolist() == pytest.approx([0.925, 0.975, 0.0, -0.075])
    assert algorithm.state()["kl"] == algorithm_of(type="reinforce_pp", kl=kl).state()["kl"], "not before the update"
    algorithm.after_update()
    algorithm.after_update()
    moved = 0.1 * (1 + 0.2 * 2 / 10)
    _, facts = algorithm.compute_advantages([scores], lambda vector: vector)
    assert facts["kl_coefficient"] == pytest.approx(moved), "once, by two trajectories"
    resumed = algorithm_of(type="reinforce_pp", kl=kl)
    resumed.compute_advantages([scores], lambda vector: vector)
    resumed.load(json.loads(json.dumps(algorithm.state())))
    resumed.after_update()
    assert resumed.state() == algorithm.state(), "the batch before it was loaded is forgotten"
    bad = batch_of([math.nan, -1.0, 0.0, -2.0], [-1.5, -1.25, 0.0, -2.75])
    algorithm.after_update()
    before = algorithm.state()
    _, facts = algorithm.compute_advantages([bad], lambda vector: vector)
    algorithm.after_update()
    assert math.isnan(facts["kl_reference"]) and algorithm.state() == before


def test_a_batch_without_tokens_has_no_divergence() -> None:
    algorithm = algorithm_of(type="reinforce_pp", whiten=False, kl={"coefficient": 0.1})
    empty = dataclasses.replace(batch_of([0.0] * 4, [0.0] * 4), mask=torch.zeros(4, dtype=torch.bool))
    (found,), facts = algorithm.compute_advantages([empty], lambda vector: vector)
    assert facts == {"kl_reference": 0.0, "kl_coefficient": 0.1} and found.advantages.tolist() == [0.0] * 4
    off = algorithm_of(type="reinforce_pp", whiten=False, kl={"coefficient": 0.0})
    (found,), facts = off.compute_advantages([batch_of([0.0] * 4, [0.0] * 4)], lambda vector: vector)
    assert facts == {} and found.advantages.tolist() == [1, 1, 0, 0]
