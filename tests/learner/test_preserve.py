"""`preserve`: numbers worked out by hand, and slow loops over single tokens in float64, through the settings.

By hand, one right trajectory of two turns, old log-probs all -1:
    turn 0: log-probs -1.5, -.7, -1.1    d = .5, -.3, .1    sum  .3: fallen
    turn 1: log-probs -1.4, -.4          d = .4, -.6        sum -.2: risen; of the trajectory: +.1, fallen
token: .5 + .1 + .4 = 1.0; turn: .5 + .1 = .6; trajectory: as token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from learner.algorithms import build_algorithm
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs
from learner.algorithms.losses.trust_region import preserve
from learner.config.algorithm import REGISTRY, AlgorithmSettings, DistillSettings

TURNS = ((2, 3), (1, 1, 2), (4,), (2, 2), (3, 1))
"""Tokens of the turns of five trajectories."""
GATES = ("token", "turn", "trajectory")
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"threshold": 0.15},
    {"positive_only": False},
    {"answer_weight": 0.0},
    {"answer_weight": "searches"},
)


def validated(**settings: Any) -> Any:
    return TypeAdapter(AlgorithmSettings).validate_python(settings)


def by_hand(gate: str, **more: Any) -> tuple[float, list[float]]:
    logprobs = torch.tensor([-1.5, -0.7, -1.1, -1.4, -0.4], dtype=torch.float64, requires_grad=True)
    units = {"token": [0, 1, 2, 3, 4], "turn": [0, 0, 0, 1, 1], "trajectory": [0] * 5}
    old, mask = torch.full_like(logprobs, -1.0), torch.ones(5, dtype=torch.bool)
    gain = more.pop("gain", torch.ones_like(old))
    penalty = preserve(logprobs, old, gain, torch.tensor(units[gate]), mask, **more)
    penalty.sum().backward()
    assert logprobs.grad is not None
    return float(penalty.detach().sum()), logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("gate", "total", "slopes"),
    [("token", 1.0, [-1, 0, -1, -1, 0]), ("turn", 0.6, [-1, 0, -1, 0, 0]), ("trajectory", 1.0, [-1, 0, -1, -1, 0])],
)
def test_the_penalty_is_that_worked_out_by_hand(gate: str, total: float, slopes: list[float]) -> None:
    assert by_hand(gate) == (pytest.approx(total), slopes)


def test_a_threshold_is_in_nats_per_token_of_the_unit() -> None:
    assert by_hand("token", threshold=0.1 + 1e-9)[0] == pytest.approx(0.9)
    assert by_hand("turn", threshold=0.0999)[0] == pytest.approx(0.6), "mean .1"
    assert by_hand("turn", threshold=0.1001)[0] == 0
    assert by_hand("trajectory", threshold=0.0199)[0] == pytest.approx(1.0), "mean .02"
    assert by_hand("trajectory", threshold=0.0201)[0] == 0


def test_only_positive_advantages_count_and_ratio_one_is_not_a_fall() -> None:
    mixed = torch.tensor([1.0, 1.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    assert by_hand("token", gain=mixed) == (pytest.approx(0.5), [-1, 0, 0, 0, 0])
    assert by_hand("token", gain=mixed, positive_only=False) == (pytest.approx(0.6), [-1, 0, -1, 0, 0])
    # the mean of the trajectory is over the tokens that count: (.5 - .3 - .6) / 3 < 0
    assert by_hand("trajectory", gain=mixed) == (0.0, [0, 0, 0, 0, 0])
    for all_wrong in (0.0, -1.0):
        assert by_hand("turn", gain=torch.full((5,), all_wrong, dtype=torch.float64))[0] == 0
    same = torch.full((4,), -0.5, dtype=torch.float64, requires_grad=True)
    units, mask = torch.arange(4) // 2, torch.ones(4, dtype=torch.bool)
    penalty = preserve(same, same.detach(), torch.zeros(4).double(), units, mask, positive_only=False)
    penalty.sum().backward()
    assert penalty.tolist() == [0] * 4 and same.grad is not None and same.grad.tolist() == [0] * 4


def tokens(seed: int) -> TokenInputs:
    """Numbers of odd sizes, a third of the tokens and one whole trajectory masked with NaN, some advantages 0."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [sum(turns) for turns in TURNS]
    n = sum(sizes)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(n, generator=draw, dtype=torch.float64)

    trajectory = torch.tensor([5 * i - 2 for i, size in enumerate(sizes) for _ in range(size)])
    turn = torch.tensor([k for turns in TURNS for k, size in enumerate(turns) for _ in range(size)])
    last = torch.tensor([len(turns) - 1 for turns, size in zip(TURNS, sizes, strict=True) for _ in range(size)])
    mask = (torch.rand(n, generator=draw) < 0.7) & (trajectory != 8)
    logprobs = -0.05 - normal(0.9).abs()
    advantages = torch.randint(-1, 3, (len(TURNS),), generator=draw).double()[(trajectory + 2) // 5]
    given = {
        "logprobs": logprobs,
        "entropy": normal().abs(),
        "behaviour": torch.minimum(logprobs + normal(0.1), torch.tensor(-0.01).double()),
        "old": torch.minimum(logprobs + normal(0.3), torch.tensor(-0.01).double()),
        "advantages": advantages,
        "token_weights": normal().abs() / n,
        "answer": torch.where((turn == last) & (trajectory != 3), 1.4, -1.0).double(),
    }
    for name, tensor in given.items():
        if name != "answer":
            tensor[~mask] = math.nan
    lags = torch.zeros(n, dtype=torch.int64)
    return TokenInputs(**given, reference=None, mask=mask, trajectory=trajectory, turn=turn, lags=lags)


def slow(x: TokenInputs, given: dict[str, Any], threshold: float) -> tuple[float, list[float]]:
    """What `preserve` adds to the loss and to the gradient: one token at a time, derivatives by hand."""
    live = [i for i in range(len(x.mask)) if bool(x.mask[i])]
    d = {i: float(x.old[i]) - float(x.logprobs[i]) for i in live}
    unit = {
        i: {"token": i, "turn": (int(x.trajectory[i]), int(x.turn[i]))}.get(given["gate"], int(x.trajectory[i]))
        for i in live
    }
    least = 0.0 if given.get("positive_only", True) else -1e-300
    counted = [i for i in live if float(x.advantages[i]) > least]
    total, slopes = 0.0, [0.0] * len(x.mask)
    for i in counted:
        siblings = [d[j] for j in counted if unit[j] == unit[i]]
        if sum(siblings) <= threshold * len(siblings) or d[i] <= 0:
            continue
        weight = given["coefficient"] * float(x.token_weights[i])
        if float(x.answer[i]) >= 0:
            asked = given.get("answer_weight", 1.0)
            weight *= min(1.0, float(x.answer[i]) / 2) if asked == "searches" else asked
        total += weight * d[i]
        slopes[i] -= weight
    return total, slopes


def loss_of(settings: Any, pieces: list[TokenInputs]) -> tuple[float, list[float]]:
    total, slopes = 0.0, []
    for x in pieces:
        leaf = x.logprobs.detach().clone().requires_grad_()
        out = build_algorithm(settings).loss(dataclasses.replace(x, logprobs=leaf))
        out.loss.backward()
        total += out.loss.item()
        assert leaf.grad is not None
        slopes += leaf.grad.tolist()
    return total, slopes


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("first", range(5))
def test_every_algorithm_gets_what_a_slow_loop_finds(gate: str, first: int) -> None:
    kinds = [kind for kind in REGISTRY if kind is not DistillSettings]
    for number in range(first, len(kinds), 5):  # every algorithm with every gate, each with one of the other settings
        kind, more = kinds[number], MORE[(number + GATES.index(gate)) % len(MORE)]
        given = {"coefficient": 0.3, "gate": gate} | more
        x = tokens(number)
        base = kind(minibatches=2, old_logprobs="recompute")
        with_it = kind(minibatches=2, old_logprobs="recompute", preserve=given)
        cut = sum(map(sum, TURNS[:2]))
        names = [f.name for f in dataclasses.fields(x) if isinstance(getattr(x, f.name), torch.Tensor)]
        halves = [
            dataclasses.replace(x, **{name: getattr(x, name)[part] for name in names})
            for part in (slice(cut), slice(cut, None))
        ]
        wanted, slopes = slow(x, given, more.get("threshold", 0.0))
        for pieces in ([x], halves):
            (before, flat), (after, steep) = loss_of(base, pieces), loss_of(with_it, pieces)
            assert after - before == pytest.approx(wanted, rel=1e-9, abs=1e-12)
            assert [b - a for a, b in zip(flat, steep, strict=True)] == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_a_micro_batch_without_tokens_adds_nothing(gate: str) -> None:
    x = tokens(1)
    names = [f.name for f in dataclasses.fields(x) if isinstance(getattr(x, f.name), torch.Tensor)]
    empty = dataclasses.replace(x, **{name: getattr(x, name)[:0] for name in names})
    assert loss_of(validated(minibatches=2, preserve={"coefficient": 0.3, "gate": gate}), [empty]) == (0.0, [])


def test_a_group_of_equal_rewards_is_held_only_if_asked() -> None:
    """All wrong: GRPO's advantages are 0, so nothing is preserved, and with `positive_only: false` each fall is."""
    x = tokens(2)
    all_wrong = build_algorithm(validated(type="grpo")).advantages(
        Outcomes(np.zeros(4), np.ones(4, bool), np.zeros(4, np.int64))
    )
    assert all_wrong.tolist() == [0.0] * 4
    y = dataclasses.replace(x, advantages=torch.zeros_like(x.advantages))
    for positive_only in (True, False):
        given = {"coefficient": 0.5, "gate": "turn", "positive_only": positive_only}
        base, on = (validated(minibatches=2, old_logprobs="recompute", preserve=p) for p in ({}, given))
        (before, flat), (after, steep) = loss_of(base, [y]), loss_of(on, [y])
        wanted, slopes = slow(y, given, 0.0)
        assert (after - before, wanted > 0) == (pytest.approx(wanted, rel=1e-9, abs=1e-15), not positive_only)
        assert [b - a for a, b in zip(flat, steep, strict=True)] == pytest.approx(slopes, rel=1e-9, abs=1e-12)


def test_behaviour_logprobs_have_a_dead_zone_and_others_none() -> None:
    x = tokens(3)
    given = {"coefficient": 0.5, "gate": "token"}
    for proximal, threshold in (("behaviour", 0.02), ("recompute", 0.0)):
        old = x.behaviour if proximal == "behaviour" else x.old
        near = torch.where(torch.arange(len(old)) % 2 == 0, x.logprobs + 0.01, old)
        y = dataclasses.replace(x, old=near, behaviour=near, advantages=x.advantages.abs() + 0.5)
        algorithm = [validated(minibatches=2, old_logprobs=proximal, preserve=p) for p in ({}, given)]
        before, after = (loss_of(s, [y])[0] for s in algorithm)
        assert after - before == pytest.approx(slow(y, given, threshold)[0], rel=1e-9)
        assert (slow(y, given, 0.0)[0] > slow(y, given, 0.02)[0]) and after > before


def test_what_would_be_zero_or_has_no_advantages_is_refused() -> None:
    on = {"coefficient": 0.2}
    with pytest.raises(ValidationError, match="no effect with old_logprobs recompute and a single update"):
        validated(type="reinforce", preserve=on)
    for several in ({"minibatches": 2}, {"epochs": 2}, {"old_logprobs": "behaviour"}, {"old_logprobs": "interpolate"}):
        assert validated(type="reinforce", preserve=on, **several).preserve.coefficient == 0.2
    with pytest.raises(ValidationError, match="distill has none"):
        validated(type="distill", preserve=on)
    for wrong in ({"answer_weight": 2}, {"threshold": -0.1}, {"gate": "word"}, {"coefficient": -1}):
        with pytest.raises(ValidationError):
            validated(preserve=wrong)


def test_a_coefficient_of_zero_changes_no_bit() -> None:
    x = tokens(5)
    off = {"coefficient": 0.0, "gate": "token", "positive_only": False, "answer_weight": "searches"}
    assert loss_of(validated(minibatches=2), [x]) == loss_of(validated(minibatches=2, preserve=off), [x])
