"""Every algorithm through the whole training step: it learns, and how its batch is laid out does not matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers

from learner.algorithms import build_algorithm
from learner.config.algorithm import AlgorithmSettings
from learner.config.learner import TrainerSettings
from learner.data.batch import Batch, build_batch
from learner.model import policy as policy_model
from learner.observability.metric_table import STEP
from learner.trainer.trainer import Trainer
from protocol.errors import UserError
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.runtime.metrics import row_of
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

VOCABULARY, RIGHT, CUT = 40, 5, 9
KINDS = [get_args(m)[0].model_fields["type"].default for m in get_args(get_args(AlgorithmSettings)[0])]
TIERED = [pytest.param(kind, marks=() if kind in ("grpo", "ppo") else pytest.mark.slow) for kind in KINDS]
"""All of them, of which the fast tier has one without and one with a critic."""
OPTIM = {"lr": 1e-2, "eps": 1e-3}
"""With a large eps a step follows the gradient's size: an error in it shows, and rounding is not blown up."""


@pytest.fixture(scope="module")
def model(tiny_qwen: Path) -> Path:
    return tiny_qwen


@pytest.fixture(scope="module")
def teacher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary."""
    directory = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(1)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(model)).save_pretrained(directory)
    return directory


Start = Callable[..., Trainer]


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    def begin(**settings: Any) -> Trainer:
        given = {"optim": OPTIM, "critic": {"optim": OPTIM}} | settings
        return Trainer(RunSettings(model=model, steps=20), TrainerSettings.model_validate(given))

    yield begin


def groups(trainer: Trainer, seed: int = 0, *, noise: float = 0.0) -> list[TrajectoryGroup]:
    """Two turns with an observation between; who begins with token 5 is right, and is paid for it at once, and who
    begins with 9 is cut off by the token budget. noise: of the engine's log-probs, in nats."""
    rng = np.random.default_rng(seed)
    causal = trainer.engine.module.causal

    def score(ids: list[int]) -> list[float]:
        # as an engine would, adapters and all
        with torch.no_grad():
            table = torch.log_softmax(causal(torch.tensor([ids]), use_cache=False).logits[0].float(), -1)
        return [0.0] + [float(table[at - 1, ids[at]]) for at in range(1, len(ids))]

    def trajectory(first: int) -> Trajectory:
        one = [first, *rng.integers(6, VOCABULARY, rng.integers(1, 5)).tolist()]
        seen = rng.integers(6, VOCABULARY, rng.integers(1, 6)).tolist()
        two = rng.integers(6, VOCABULARY, rng.integers(1, 7)).tolist()
        logprobs = score([1, 2, 3, *one, *seen, *two])
        logprobs = [min(0.0, x + float(rng.normal(0, noise))) for x in logprobs] if noise else logprobs
        searched = policy_segment(one, logprobs[3 : 3 + len(one)])
        answered = policy_segment(two, logprobs[-len(two) :])
        right = float(first == RIGHT)
        segments = (
            prompt_segment([1, 2, 3]),
            searched.model_copy(update={"reward": 0.25 * right}),
            observation_segment(seen),
            answered,
        )
        status, rewards = Status.TRUNCATED if first == CUT else Status.ANSWERED, {"right": right, "early": 0.1 * first}
        return Trajectory(status=status, segments=segments, reward=right, rewards=rewards)

    firsts = [(5, 5, 9, 11), (9, 5, 12, 8), (7, 9, 5, 5), (5, 6, 7, 8)]
    return [
        TrajectoryGroup(run="t", seq=s, question=make_question(s), trajectories=tuple(trajectory(f) for f in first))
        for s, first in enumerate(firsts, 1)
    ]


def batch_of(trainer: Trainer, given: list[TrajectoryGroup], **layout: int) -> Batch:
    return build_batch(
        given,
        trainer.algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=TrainerSettings(batch=layout).batch,
        temperature=1.0,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.iter_weights())


def likelihood(trainer: Trainer) -> float:
    """Log-prob of the rewarded first token."""
    causal = trainer.engine.module.causal
    with torch.no_grad():
        return float(torch.log_softmax(causal(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1], -1)[RIGHT])


BATCHWIDE: dict[str, Any] = {
    "old_logprobs": "recompute",
    "parts": {"right": 1.0, "early": -0.5},
    "normalize_batch": True,
    "correction": {"level": "sequence", "normalize": True},
    "rejection": {"measure": "k3", "level": "mean", "high": 0.05, "second_moment": 0.02},
    "drift_coefficient": 0.1,
    "minibatches": 2,
    "preserve": {"coefficient": 0.2, "answer_weight": "searches"},
}
"""What is found over the whole batch before it is cut."""


def plenty(kind: str, teacher: Path) -> dict[str, Any]:
    """Settings that switch on what the algorithm can do."""
    if kind == "batchwide":
        return {"algorithm": {"type": "dppo"} | BATCHWIDE}
    if kind == "distill":
        return {"algorithm": {"type": kind, "entropy_coefficient": 0.001}, "reference": {"model": teacher}}
    algorithm: dict[str, Any] = {"type": kind, "kl": {"coefficient": 0.02}, "entropy_coefficient": 0.001}
    if kind in ("ppo", "reinforce_pp"):
        algorithm |= {"gamma": 0.97}
    if kind == "ppo":
        algorithm |= {"lam": 0.9}
    return {"algorithm": algorithm, "reference": {"kind": "ema", "every": 2, "tau": 0.5}}


@pytest.mark.parametrize("kind", [p for p in TIERED if p.values != ("distill",)])
def test_it_learns(start: Start, kind: str) -> None:
    trainer = start(algorithm={"type": kind})
    before = likelihood(trainer)
    for seed in range(6):
        report = trainer.train(batch_of(trainer, groups(trainer, seed)))
        assert not report.skipped
        assert [name for name in report.metrics if row_of(STEP, name)[0] not in STEP] == [], "say in metric_table what"
    assert likelihood(trainer) > before + 0.2


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "grpo" else pytest.mark.slow) for kind in (*KINDS, "batchwide")],
)
def test_packing_micro_batches_and_order_do_not_matter(start: Start, teacher: Path, kind: str) -> None:
    found = []
    layouts = (
        ({}, False),
        ({"micro_batch_tokens": 1}, False),
        ({"row_tokens": 40}, True),
        ({"share_prompts": True}, True),
    )
    for layout, reverse in layouts:
        trainer = start(**plenty(kind, teacher))
        reports = []
        for seed in range(3):
            given = groups(trainer, seed, noise=0.2 if kind == "batchwide" else 0.0)
            reports.append(trainer.train(batch_of(trainer, given[::-1] if reverse else given, **layout)))
            assert all(row_of(STEP, name)[0] in STEP for name in reports[-1].metrics)
        found.append((weights(trainer), reports))
    (first, reports), *others = found
    if kind == "batchwide":
        assert any(0 < report.metrics["rejected"] < 1 for report in reports)
    for other, other_reports in others:
        for one, two in zip(reports, other_reports, strict=True):
            assert two.loss == pytest.approx(one.loss, abs=2e-6)
            assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
            shared = set(one.metrics) & set(two.metrics) - {
                "padding_share",
                "micro_batches",
                "tokens_read",
                "tokens_shared",
            }
            shared = {name for name in shared if not name.startswith(("logprob_change", "fell_"))}  # of a sample
            assert {n: two.metrics[n] for n in shared} == pytest.approx({n: one.metrics[n] for n in shared}, abs=1e-4)
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


def test_the_policys_schedule_ends_with_the_run_after_a_critics_warmup(model: Path) -> None:
    optim = {"lr": 1e-3, "schedule": "linear", "final_fraction": 0.0}
    settings = {"algorithm": {"type": "ppo"}, "optim": optim, "critic": {"optim": optim, "warmup_steps": 2}}
    trainer = Trainer(RunSettings(model=model, steps=5), TrainerSettings.model_validate(settings))
    found = [trainer.train(batch_of(trainer, groups(trainer, seed))).metrics for seed in range(5)]
    assert [m.get("lr") for m in found] == [None, None, *(pytest.approx(x) for x in (1e-3, 5e-4, 0.0))]
    assert [m["critic_lr"] for m in found] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_the_learning_rates_of_the_update_are_reported(start: Start) -> None:
    optim = {"lr": 1e-3, "warmup_fraction": 0.2, "schedule": "linear", "final_fraction": 0.0}
    trainer = start(algorithm={"type": "ppo"}, optim=optim, critic={"optim": {"lr": 5e-3, "warmup_fraction": 0.0}})
    found = [trainer.train(batch_of(trainer, groups(trainer, seed))).metrics for seed in range(6)]
    updates = 20 * trainer.algorithm.epochs * trainer.algorithm.minibatches
    each = trainer.algorithm.epochs * trainer.algorithm.minibatches
    expected = []
    for step in range(1, 7):
        last = step * each  # the number of the step's last update, from 1
        warm = updates // 5
        expected.append(1e-3 * (last / warm if last <= warm else (updates - last) / (updates - 1 - warm)))
    assert [m["lr"] for m in found] == pytest.approx(expected)
    assert {m["critic_lr"] for m in found} == {5e-3}


@pytest.mark.parametrize("kind", TIERED)
def test_a_restart_goes_on_bit_for_bit(start: Start, teacher: Path, kind: str, tmp_path: Path) -> None:
    settings = plenty(kind, teacher)
    one, two = start(**settings), start(**settings)
    for seed in range(3):
        one.train(batch_of(one, groups(one, seed)))
    one.save_state(tmp_path)
    two.load_state(tmp_path)
    batch = batch_of(one, groups(one, 3))
    reports = [trainer.train(batch) for trainer in (one, two)]
    assert reports[0].metrics == reports[1].metrics
    theirs = weights(two)
    for name, value in weights(one).items():
        assert torch.equal(theirs[name], value), name


def test_a_state_of_another_algorithm_is_refused_in_words(start: Start, tmp_path: Path) -> None:
    start(algorithm={"type": "ppo", "kl": {"coefficient": 0.1}}).save_state(tmp_path)
    adaptive = start(algorithm={"type": "ppo", "kl": {"coefficient": 0.1, "target": 0.1}})
    with pytest.raises(UserError, match=r"cannot load the algorithm's state in .*trainer\.json"):
        adaptive.load_state(tmp_path)


def test_values_come_to_explain_the_returns(start: Start) -> None:
    trainer = start(algorithm={"type": "ppo"}, critic={"optim": {"lr": 3e-2}})
    given = groups(trainer)
    found = [trainer.train(batch_of(trainer, given)).metrics["explained_variance"] for _ in range(15)]
    assert found[0] == pytest.approx(0, abs=1e-6), "a head of zeros explains nothing"
    assert found[-1] > 0.5


@pytest.mark.fault(39)
def test_a_skipped_batch_leaves_no_trace_in_critic_moments_and_coefficient(start: Start, tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "target": 0.01, "horizon": 10, "place": "reward"}
    trainer = start(algorithm={"type": "ppo", "reward_scale": "running", "kl": kl})
    trainer.train(batch_of(trainer, groups(trainer)))
    trainer.save_state(tmp_path / "before")
    batch = batch_of(trainer, groups(trainer, 1))
    backward = trainer.engine.backward
    trainer.engine.backward = lambda loss: backward(loss * math.nan)  # the policy's; the critic's is finite
    report = trainer.train(batch)
    trainer.engine.backward = backward
    assert (report.skipped, report.reason, report.tokens_trained) == (True, "not finite", 0)
    trainer.save_state(tmp_path / "after")
    for path in (path for path in (tmp_path / "before").rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "after" / path.relative_to(tmp_path / "before")).read_bytes(), path
    before = trainer.algorithm.state()
    trainer.train(batch_of(trainer, groups(trainer, 1)))
    assert {name: value != before[name] for name, value in trainer.algorithm.state().items()} == {
        "kl": True,
        "moments": True,
    }


def test_a_batch_without_tokens_leaves_the_moments_alone(start: Start) -> None:
    trainer = start(algorithm={"type": "reinforce_pp", "reward_scale": "running"})
    trainer.train(batch_of(trainer, groups(trainer)))
    before = trainer.algorithm.state()
    late = build_batch(
        groups(trainer, 1), trainer.algorithm, now_step=9, lineage=(PolicyVersion(1, 0),), max_lag=2,
        settings=TrainerSettings().batch, temperature=1.0,
    )  # fmt: skip
    assert trainer.train(late).reason == "no tokens"
    assert trainer.algorithm.state() == before


def test_a_critic_that_warms_up_leaves_the_policy_alone(start: Start) -> None:
    trainer = start(algorithm={"type": "ppo"}, critic={"optim": OPTIM, "warmup_steps": 2})
    before = weights(trainer)
    for seed in range(2):
        report = trainer.train(batch_of(trainer, groups(trainer, seed)))
        assert not report.skipped
        assert [name for name in report.metrics if row_of(STEP, name)[0] not in STEP] == [], "say in metric_table what"
        assert report.metrics["critic_grad_norm"] > 0
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert trainer.updates == 0
    trainer.train(batch_of(trainer, groups(trainer, 3)))
    assert trainer.updates == 1
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_value_head_on_the_policy_learns_and_is_not_published(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "HEAD_LR_SCALE", 5.0)
    critic = {"backbone": "policy"}
    # a return with the critic's own value in it would move with the critic
    trainer = start(algorithm={"type": "ppo", "bootstrap_truncated": False}, critic=critic, optim={"lr": 1e-2})
    published = set(weights(trainer))
    given = groups(trainer)
    found = [trainer.train(batch_of(trainer, given)).metrics["explained_variance"] for _ in range(30)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[-1] > 0.3
    assert published == set(weights(trainer)) == {n for n, _ in trainer.engine.module.causal.named_parameters()}


def test_values_do_not_cross_from_one_trajectory_of_a_row_to_the_next(start: Start) -> None:
    trainer = start(algorithm={"type": "ppo", "gamma": 0.9, "lam": 0.8})
    given = groups(trainer)
    packed = batch_of(trainer, given, row_tokens=60)
    assert any(int(m.document_ids.max()) > 0 for m in packed.micro_batches)
    changed = []
    for m in packed.micro_batches:
        rewards = m.rewards.copy()
        rewards[m.trajectory == 3] += 7.0
        changed.append(dataclasses.replace(m, rewards=rewards))
    algorithm = build_algorithm(trainer.settings.algorithm.model_copy(update={"whiten": False}))
    from learner.trainer.scoring import score

    def judged(batch: Batch) -> dict[int, list[float]]:
        (share,) = trainer.rank_batches(batch)
        scored = [tokens.scores for tokens in score(share, trainer._models, algorithm)]
        judgements, _ = algorithm.compute_advantages(scored, trainer.engine.all_reduce)
        return {
            int(n): j.advantages[s.trajectory == n].tolist()
            for s, j in zip(scored, judgements, strict=True)
            for n in s.trajectory.unique()
        }

    before, after = judged(packed), judged(dataclasses.replace(packed, shares=((tuple(changed),),)))
    assert {n for n in before if before[n] != after[n]} == {3}


def test_adapters_learn_and_are_published_merged_or_alone(start: Start, model: Path) -> None:
    settings = {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optim": {"lr": 3e-2}}
    trainer = start(**settings)
    plain = dict(start().engine.module.causal.named_parameters())
    for name, value in weights(trainer).items():
        assert torch.equal(value, plain[name]), "an adapter is nothing at first"
    before = likelihood(trainer)
    for seed in range(8):
        trainer.train(batch_of(trainer, groups(trainer, seed)))
    assert likelihood(trainer) > before + 0.2
    published = weights(trainer)
    merged = transformers.Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged.load_state_dict(published, strict=False)
    with torch.no_grad():
        logits = merged(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1]
    assert float(torch.log_softmax(logits, -1)[RIGHT]) == pytest.approx(likelihood(trainer), abs=1e-5)
    alone = {n for n, _ in Trainer.iter_weights(_with_adapters(trainer))}
    assert alone and all(".lora_" in name for name in alone)


def _with_adapters(trainer: Trainer) -> Trainer:
    trainer._adapters = True
    return trainer


@pytest.mark.parametrize("divergence", ["k1+", pytest.param("reverse", marks=pytest.mark.slow)])
def test_a_student_comes_to_its_teacher_whatever_the_rewards(start: Start, teacher: Path, divergence: str) -> None:
    algorithm = {"type": "distill", "kl": {"type": divergence}}
    trainer = start(algorithm=algorithm, reference={"model": teacher}, optim={"lr": 3e-2})
    far = []
    for seed in range(16):
        far.append(trainer.train(batch_of(trainer, groups(trainer, seed))).metrics["kl_reference"])
    assert sum(far[-4:]) < 0.7 * sum(far[:4])


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_a_head_of_all_ids_gives_the_exact_divergence_of_every_trained_token(
    start: Start, teacher: Path, divergence: str
) -> None:
    """The whole way to the metric: a head that was lost between the models would leave the sampled tokens' estimate."""
    algorithm = {"type": "distill", "kl": {"type": divergence, "top": VOCABULARY}}
    trainer = start(algorithm=algorithm, reference={"model": teacher})
    policy, other = trainer.engine.module.causal, transformers.AutoModelForCausalLM.from_pretrained(teacher)
    given, exact = groups(trainer), []
    for trajectory in (t for group in given for t in group.trajectories):
        with torch.no_grad():
            p, q = (
                torch.log_softmax(m(torch.from_numpy(trajectory.ids.astype(np.int64))[None]).logits[0].double(), -1)
                for m in (policy, other)
            )
        first, second = (p, q) if divergence == "reverse" else (q, p)
        exact += [
            float((first[at - 1].exp() * (first[at - 1] - second[at - 1])).sum())
            for at in np.flatnonzero(trajectory.mask)
        ]
    found = trainer.train(batch_of(trainer, given)).metrics["kl_reference"]
    assert found == pytest.approx(sum(exact) / len(exact), rel=1e-4)


def test_an_average_of_the_policy_follows_it_slowly(start: Start) -> None:
    frozen, ema = (
        start(algorithm={"kl": {"coefficient": 0.01}}, reference={"kind": kind, "every": 1, "tau": 0.5})
        for kind in ("frozen", "ema")
    )
    far = []
    for trainer in (frozen, ema):
        given = groups(trainer)
        reports = [trainer.train(batch_of(trainer, given)) for _ in range(6)]
        far.append(reports[-1].metrics["kl_reference"])
    assert 0 < far[1] < far[0]
