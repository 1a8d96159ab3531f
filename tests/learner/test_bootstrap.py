"""PPO's bootstrap at truncation, through the real critic and whatever the packing, against AReaL's recursion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.algorithms import build_algorithm
from learner.algorithms.base import TokenScores
from learner.config.algorithm import PpoSettings
from learner.config.learner import TrainerSettings
from learner.data.batch import build_batch
from learner.trainer.scoring import score
from learner.trainer.trainer import Trainer
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

GAMMA, LAM = 0.97, 0.9
ENDS = (Status.ANSWERED, Status.TRUNCATED, Status.OUT_OF_TURNS, Status.TRUNCATED)


def trajectory(status: Status, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    one, seen, two = (rng.integers(4, 40, rng.integers(1, 7)).tolist() for _ in range(3))
    segments = (prompt_segment([1, 2, 3]), policy_segment(one), observation_segment(seen), policy_segment(two))
    return Trajectory(status=status, segments=segments, reward=float(rng.normal()))


def groups() -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            run="t",
            seq=seq,
            question=make_question(seq),
            trajectories=tuple(trajectory(s, 10 * seq + i) for i, s in enumerate(ENDS)),
        )
        for seq in (1, 2)
    ]


@pytest.fixture
def trainer(tiny_qwen: Path, request: pytest.FixtureRequest) -> Trainer:
    """`request.param`: whose backbone the value head is on."""
    algorithm = {"type": "ppo", "gamma": GAMMA, "lam": LAM, "whiten": False}
    settings = {"algorithm": algorithm, "critic": {"backbone": request.param}}
    made = Trainer(RunSettings(model=tiny_qwen, steps=2), TrainerSettings.model_validate(settings))
    critic = made._models.critic
    head = made.engine.module.value_head if critic is None else critic.engine.module.head
    torch.manual_seed(3)
    torch.nn.init.normal_(head.weight)  # zeros at first, which would be no test
    return made


def values_of(trainer: Trainer, ids: list[int]) -> list[float]:
    """[T]: the critic's value of the state after each token, of the trajectory read alone."""
    text = torch.tensor([ids])
    read = (text, torch.arange(len(ids))[None], None, torch.arange(len(ids)))
    critic = trainer._models.critic
    with torch.no_grad():
        found = (
            trainer.engine.forward(*read, text[0], 1.0, False, 0).values
            if critic is None
            else critic.engine.forward(*read)
        )
    return [float(x) for x in found]


def areal(trained: list[bool], values: list[float], reward: float, *, truncated: bool) -> tuple[list[float], ...]:
    """AReaL's loop (`areal/trainer/ppo/actor.py`): `values[t]` after token t; the state after the last token counts
    where the sequence did not come to its end. Advantages and returns of the trained tokens, in order.
    """
    last = max(t for t, kept in enumerate(trained) if kept)
    following, carried = (values[-1] if truncated else 0.0), 0.0
    advantages, returns = [], []
    for t in reversed(range(1, len(trained))):
        if trained[t]:
            delta = (reward if t == last else 0.0) + GAMMA * following - values[t - 1]
            carried = delta + GAMMA * LAM * carried
            following = values[t - 1]
            advantages.append(carried)
            returns.append(carried + values[t - 1])
    return advantages[::-1], returns[::-1]


@pytest.mark.parametrize("trainer", ["own", "policy"], indirect=True)
@pytest.mark.parametrize(
    "layout", [{}, {"row_tokens": 60}, {"row_tokens": 40, "micro_batch_tokens": 1}, {"share_prompts": True}]
)
@pytest.mark.parametrize("on", [True, False])
def test_what_truncation_cut_off_is_worth_the_state_after_it(
    trainer: Trainer, layout: dict[str, int], on: bool
) -> None:
    settings = trainer.settings.algorithm.model_copy(update={"bootstrap_truncated": on})
    algorithm, given = build_algorithm(settings), groups()
    batch = build_batch(
        given,
        algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=TrainerSettings.model_validate({"batch": layout}).batch,
        temperature=1.0,
        ranks=3,
    )
    found: dict[int, tuple[list[float], list[float]]] = {}
    for share in batch.rank_batches:  # what three ranks do, one after the other: dummies and all
        scored = [tokens.scores for tokens in score(share, trainer._models, algorithm)]
        for s, judgement in zip(
            scored, algorithm.compute_advantages(scored, trainer.engine.all_reduce)[0], strict=True
        ):
            for number in torch.unique(s.trajectory[s.mask]).tolist():
                kept = s.trajectory == number
                found[number] = (judgement.advantages[kept].tolist(), judgement.returns[kept].tolist())
    flat = [t for g in given for t in g.trajectories]
    assert sorted(found) == list(range(len(flat)))
    for number, t in enumerate(flat):
        cut = on and t.status is Status.TRUNCATED
        expected = areal(t.mask.tolist(), values_of(trainer, t.ids.tolist()), t.reward, truncated=cut)
        for ours, theirs in zip(found[number], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)


def test_one_cut_off_trajectory_by_hand() -> None:
    """gamma 0.5, lambda 1, V = (1, 2), V after the end 4, reward 8: R = (8 + 0.5 * 4) and half of that."""
    values, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    scored = TokenScores(
        rewards=torch.tensor([0.0, 8.0]),
        advantages=zero,
        behaviour=zero,
        old=zero,
        reference=None,
        values=values,
        mask=torch.ones(2, dtype=torch.bool),
        trajectory=zero.long(),
        turn=zero.long(),
        last_values=torch.tensor([4.0, 4.0]),
    )
    (judged,), _ = build_algorithm(PpoSettings(gamma=0.5, lam=1.0, whiten=False)).compute_advantages(
        [scored], lambda vector: vector
    )
    assert judged.returns.tolist() == [5.0, 10.0]
    assert judged.advantages.tolist() == [4.0, 8.0]
