"""Change of log-probs over a step, against a model that scores each trajectory alone before and after it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from learner.data.batch import build_batch
from learner.trainer.rescoring import FALL, changes, choose, rescore, trajectories
from learner.trainer.scoring import on_device
from learner.trainer.trainer import Trainer
from protocol.messages import Owner, Trajectory
from protocol.versions import PolicyVersion
from tests.learner.test_trainer_algorithms import Start, batch_of, groups, model, start, weights

__all__ = ["model", "start"]


def by_turn(trainer: Trainer, one: Trajectory) -> list[list[float]]:
    """Log-probs of the sampled tokens of each turn, by a pass over this trajectory alone."""
    ids = torch.from_numpy(one.ids.astype("int64"))[None]
    with torch.no_grad():
        table = torch.log_softmax(trainer.engine.module.causal(ids, use_cache=False).logits[0].double(), -1)
    found, at = [], 0
    for segment in one.segments:
        places = range(at, at + len(segment.ids))
        if segment.owner is Owner.POLICY:
            found.append([float(table[n - 1, ids[0, n]]) for n in places])
        at += len(segment.ids)
    return found


@pytest.mark.parametrize(
    "layout", [{}, {"row_tokens": 1000}, {"share_prompts": True, "row_tokens": 400}, {"share_prompts": True}], ids=str
)
@pytest.mark.parametrize("algorithm", [{}, {"epochs": 2, "old_logprobs": "recompute"}], ids=str)
def test_the_change_is_that_of_each_trajectory_alone(
    start: Start, layout: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    trainer = start(algorithm=algorithm, batch=layout, rescored_share=1.0)
    given = groups(trainer, 3)
    good = [t for g in given for t in g.trajectories if t.reward > sum(u.reward for u in g.trajectories) / 4]
    before = [by_turn(trainer, t) for t in good]
    metrics = trainer.train(batch_of(trainer, given, **layout)).metrics
    after = [by_turn(trainer, t) for t in good]
    change = [[[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(*pair, strict=True)]
              for pair in zip(before, after, strict=True)]  # fmt: skip
    flat = [d for one in change for turn in one for d in turn]
    assert metrics["logprob_change"] == pytest.approx(sum(flat) / len(flat), abs=2e-5)
    for k in (0, 1):
        own = [d for one in change for d in one[k]]
        assert metrics[f"logprob_change_turn_{k}"] == pytest.approx(sum(own) / len(own), abs=2e-5)
    assert "logprob_change_turn_2" not in metrics
    fell = [sum(turn) < -FALL * len(turn) for one in change for turn in one]
    assert metrics["fell_turns"] == pytest.approx(sum(fell) / len(fell))
    fell = [sum(map(sum, one)) < -FALL * sum(map(len, one)) for one in change]
    assert metrics["fell_trajectories"] == pytest.approx(sum(fell) / len(fell))


def test_measuring_changes_no_bit_of_the_training(start: Start) -> None:
    found = []
    for share in (0.0, 1.0):
        trainer = start(rescored_share=share, algorithm={"minibatches": 2})
        metrics = [trainer.train(batch_of(trainer, groups(trainer, seed))).metrics for seed in range(2)]
        assert all(("logprob_change" in m) == bool(share) for m in metrics)
        found.append(weights(trainer))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_a_preserving_term_of_coefficient_zero_changes_no_bit_of_the_training(start: Start) -> None:
    found = []
    other = {"gate": "token", "threshold": 0.0, "positive_only": False, "answer_weight": "searches"}
    for preserve in ({}, {"preserve": {"coefficient": 0.0} | other}, {"preserve": {"coefficient": 0.2} | other}):
        trainer = start(algorithm={"minibatches": 2} | preserve)
        reports = [trainer.train(batch_of(trainer, groups(trainer, seed), row_tokens=40)) for seed in range(2)]
        found.append(([(r.loss, r.grad_norm, r.metrics) for r in reports], weights(trainer)))
    (plain, without), (zero, same), (_, preserved) = found
    assert plain == zero
    assert without.keys() == same.keys() and all(torch.equal(value, same[name]) for name, value in without.items())
    assert any(not torch.equal(value, preserved[name]) for name, value in without.items())


def test_a_rank_that_has_only_a_dummy_adds_nothing(start: Start) -> None:
    trainer = start(algorithm={"minibatches": 2, "preserve": {"coefficient": 0.2}}, rescored_share=1.0)
    batch = build_batch(
        groups(trainer)[:1], trainer.algorithm, now_step=0, lineage=(PolicyVersion(1, 0),), max_lag=2,
        settings=trainer.settings.batch, temperature=1.0, ranks=8,
    )  # fmt: skip
    idle = [part for part in batch.rank_batches if not any(m.token_weights.any() for m in part.minibatches[0])]
    assert len(idle) == 4
    for part in (idle[0], batch.rank_batches[0]):
        scored = on_device(part, torch.device("cpu"))
        for tokens in scored:
            tokens.before = torch.zeros_like(tokens.advantages)
        found = rescore(part, scored, trainer._models).ratios
        assert bool(float(found["logprob_change"][1])) == (part is not idle[0])
        assert all(float(x) == 0 for name in found for x in found[name]) == (part is idle[0])


def test_those_with_a_positive_advantage_come_first_within_the_budget(start: Start) -> None:
    trainer = start()
    chosen = defaultdict(set)
    for layout in ({}, {"micro_batch_tokens": 1}, {"share_prompts": True}):
        batch = batch_of(trainer, groups(trainer), **layout)
        (part,) = batch.rank_batches
        scored = on_device(part, torch.device("cpu"))
        known = [s for m, t in zip(part.minibatches[0], scored, strict=True) for s in trajectories(m, t)]
        assert sorted(s.number for s in known) == list(range(16))
        for s in known:
            assert torch.equal(torch.from_numpy(s.ids[s.index][1:]), s.tokens.ids.flatten()[s.tokens.index[s.own]][1:])
        good = {s.number for s in known if s.tokens.advantages[torch.from_numpy(s.own)][0] > 0}
        assert len(good) == 6
        for turn in range(16):
            picked = [s.number for s in choose(known, 45, turn, packed=True)]
            assert set(picked) <= good and sum(len(s.ids) for s in known if s.number in picked) <= 45
            chosen[turn].add(tuple(picked))
        assert [len(choose(known, budget, 0, packed=True)) for budget in (0, 10_000)] == [1, 16]
    assert all(len(each) == 1 for each in chosen.values()), "whatever the layout"
    assert {n for each in chosen.values() for picked in each for n in picked} == good, "all of them in turn"


def test_shares_by_hand() -> None:
    change = torch.tensor([0.1, -0.3, 0.2, -0.1, 0.5, -1.0, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1, 1, 1, 2, -1, 1], dtype=torch.float64)
    trajectory, turn = torch.tensor([4, 4, 4, 7, 7, 9, 2]), torch.tensor([0, 0, 1, 0, 6, 0, 0])
    mask = torch.tensor([True] * 6 + [False])
    found = {name: tuple(map(float, x)) for name, x in changes(change, advantages, trajectory, turn, mask).items()}
    # trajectory 4: 0 in sum, its turns -.2 and .2; trajectory 7: .4, its turns -.1 and .5; 9 has a negative advantage
    assert found["logprob_change"] == pytest.approx((0.4, 5))
    assert found["logprob_change_turn_0"] == pytest.approx((-0.3, 3))
    assert found["logprob_change_turn_1"] == pytest.approx((0.2, 1))
    assert found["logprob_change_turn_3"] == pytest.approx((0.5, 1)), "with all later ones"
    assert found["fell_turns"] == (2, 4) and found["fell_trajectories"] == (0, 2)
    nothing = changes(change, -advantages.abs(), trajectory, turn, mask)
    assert all(float(x[1]) == 0 for x in nothing.values())


def test_a_critic_that_warms_up_has_no_change(start: Start) -> None:
    trainer = start(algorithm={"type": "ppo"}, critic={"warmup_steps": 1})
    found = [trainer.train(batch_of(trainer, groups(trainer, seed))).metrics for seed in range(2)]
    assert ["logprob_change" in metrics for metrics in found] == [False, True]
