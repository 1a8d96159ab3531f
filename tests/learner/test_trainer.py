"""The whole training step on a small transformer: groups in, moved weights out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from learner.config.learner import TrainerSettings
from learner.data.batch import Batch, build_batch
from learner.delivery.token_accounting import token_split
from learner.trainer.trainer import Trainer
from protocol.errors import UserError
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, policy_segment, prompt_segment

VOCABULARY = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def start(model):
    running: list[Trainer] = []

    def _start(**settings) -> Trainer:
        given = {"optim": {"lr": 1e-2}} | settings
        running.append(Trainer(RunSettings(model=model, steps=20), TrainerSettings.model_validate(given)))
        return running[-1]

    return _start


def behaviour(trainer: Trainer, ids: list[int], prompt: int, temperature: float) -> list[float]:
    """Log-probs that transformers gives ids[prompt:], as an engine would have reported them."""
    causal = trainer.engine.module.causal
    with torch.no_grad():
        table = torch.log_softmax(causal(torch.tensor([ids]), use_cache=False).logits[0].float() / temperature, -1)
    return [float(table[at - 1, ids[at]]) for at in range(prompt, len(ids))]


def groups(trainer: Trainer, temperature: float = 1.0, seed: int = 0) -> list[TrajectoryGroup]:
    """Who begins the answer with token 5 is right."""
    rng = np.random.default_rng(seed)

    def trajectory(first: int) -> Trajectory:
        ids = [1, 2, 3, first, *rng.integers(1, VOCABULARY, rng.integers(2, 9)).tolist()]
        segments = (prompt_segment(ids[:3]), policy_segment(ids[3:], behaviour(trainer, ids, 3, temperature)))
        return Trajectory(status=Status.ANSWERED, segments=segments, reward=float(first == 5))

    return [
        TrajectoryGroup(
            run="t", seq=s, question=make_question(s), trajectories=tuple(trajectory(f) for f in (5, 5, 9, 11))
        )
        for s in (1, 2, 3)
    ]


def batch_of(trainer: Trainer, given=None, temperature: float = 1.0, **layout) -> Batch:
    return build_batch(
        groups(trainer, temperature) if given is None else given,
        trainer.algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=TrainerSettings(batch=layout).batch,
        temperature=temperature,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.iter_weights())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_the_learner_agrees_with_the_engine(start, temperature):
    trainer = start()
    batch = batch_of(trainer, temperature=temperature)
    report = trainer.train(batch)
    assert report.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert report.metrics["logprob_gap_max"] < 1e-4
    assert report.metrics["clip_fraction"] == 0
    assert report.loss == pytest.approx(
        -float(sum(m.advantages @ m.token_weights for m in batch.micro_batches)), abs=1e-5
    )
    assert report.grad_norm > 0
    assert not report.skipped


def test_training_makes_the_rewarded_token_likelier(start):
    trainer = start()
    given = groups(trainer)
    before = behaviour(trainer, [1, 2, 3, 5], 3, 1.0)[0]
    for _ in range(3):
        trainer.train(batch_of(trainer, given))
    assert behaviour(trainer, [1, 2, 3, 5], 3, 1.0)[0] > before + 0.5
    assert trainer.updates == 3


def test_how_a_batch_is_cut_moves_the_weights_the_same(start):
    found = []
    for layout in ({}, {"micro_batch_tokens": 1}, {"row_tokens": 30, "micro_batch_tokens": 60}):
        trainer = start()
        reports = [trainer.train(batch_of(trainer, groups(trainer, seed=s), **layout)) for s in range(2)]
        found.append((weights(trainer), reports))
    (first, reports), *others = found
    for other, other_reports in others:
        assert [r.grad_norm for r in other_reports] == pytest.approx([r.grad_norm for r in reports], rel=1e-4)
        assert [r.loss for r in other_reports] == pytest.approx([r.loss for r in reports], abs=1e-6)
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


def test_equal_rewards_leave_the_weights_alone(start):
    trainer = start()
    equal = [
        g.model_copy(update={"trajectories": tuple(t.model_copy(update={"reward": 1.0}) for t in g.trajectories)})
        for g in groups(trainer)
    ]
    before = weights(trainer)
    report = trainer.train(batch_of(trainer, equal))
    assert report.grad_norm == 0
    assert report.metrics["zero_advantage_share"] == 1
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_batch_without_tokens_is_skipped_with_its_reason(start):
    trainer = start()
    report = trainer.train(batch_of(trainer, []))
    assert (report.skipped, report.reason, report.tokens_trained) == (True, "no tokens", 0)
    assert trainer.updates == 0


@pytest.mark.fault(39)
def test_a_batch_that_is_not_finite_is_skipped_with_its_reason(start):
    trainer = start()
    batch = batch_of(trainer, micro_batch_tokens=1)
    before = weights(trainer)
    batch.micro_batches[1].advantages[0] = math.inf
    report = trainer.train(batch)
    assert (report.skipped, report.reason, report.tokens_trained) == (True, "not finite", 0)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert not trainer.train(batch_of(trainer)).skipped


@pytest.mark.fault(39)
@pytest.mark.parametrize(("broken", "minibatches"), [(2, 1), (3, 2), (4, 3), (5, 3)])
def test_of_a_batch_with_several_updates_those_before_a_non_finite_one_count(start, broken, minibatches):
    """Three minibatches, two epochs: the gradient of update `broken` is not finite."""
    several = {"minibatches": 3, "epochs": 2, "old_logprobs": "recompute"}
    trainer, whole = start(algorithm=several), start(algorithm=several)
    batch = batch_of(trainer)
    before, backward, calls = weights(trainer), trainer.engine.backward, []

    def breaking(loss: torch.Tensor) -> None:
        calls.append(1)
        backward(loss * math.nan if len(calls) == broken else loss)

    trainer.engine.backward = breaking
    report = trainer.train(batch)
    assert (report.skipped, report.reason) == (False, "not finite"), "reported, although the weights changed"
    assert len(calls) == broken and trainer.updates == broken - 1
    sizes = [sum(len(m.index) for m in part) for part in batch.minibatches]
    assert (report.minibatches, report.tokens_trained) == (minibatches, sum(sizes[:minibatches]))
    assert math.isnan(report.grad_norm)
    assert report.metrics["weight_mean"] == pytest.approx(1), "a mean over the tokens of the last epoch's updates"
    own = token_split(batch, groups(trainer), 3, report.minibatches)
    assert own.trained == report.tokens_trained and sum(own) == sum(sizes)
    after = weights(trainer)
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    trainer.engine.backward = backward
    done = trainer.train(batch_of(trainer))
    assert (done.reason, done.minibatches, done.tokens_trained) == ("", 3, sum(sizes))
    assert whole.train(batch).tokens_trained == sum(sizes)


def test_the_tokens_of_another_model_are_refused(start):
    trainer = start()
    batch = batch_of(trainer)
    batch.micro_batches[0].targets[0] = VOCABULARY
    with pytest.raises(UserError, match="contains token 40"):
        trainer.train(batch)


def test_published_weights_are_what_transformers_would_save(start, model, tmp_path):
    trainer = start()
    published = weights(trainer)
    saved = load_file(model / "model.safetensors")
    assert published.keys() == saved.keys(), "tied weights once, names of Hugging Face"
    for name, value in saved.items():
        torch.testing.assert_close(published[name], value, rtol=0, atol=0)
    assert {path.name for path in trainer.model_files} >= {"config.json", "tokenizer.json"}
    assert "model.safetensors" not in {path.name for path in trainer.model_files}


@pytest.mark.parametrize("stage", [0, 3])
def test_state_comes_back_bit_for_bit(start, tmp_path, stage):
    first, second = (start(engine={"zero_stage": stage}) for _ in range(2))
    first.train(batch_of(first))
    batch = batch_of(first)
    first.save_state(tmp_path)
    second.load_state(tmp_path)
    reports = [trainer.train(batch) for trainer in (first, second)]
    assert reports[0].grad_norm == reports[1].grad_norm
    assert reports[0].metrics == reports[1].metrics
    theirs = weights(second)
    for name, value in weights(first).items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=0)


def test_the_divergence_from_the_reference_starts_at_zero_and_grows(start):
    trainer = start(algorithm={"kl": {"coefficient": 0.1}})
    found = [trainer.train(batch_of(trainer)).metrics["kl_reference"] for _ in range(3)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[2] > 1e-3


def test_a_pull_to_the_reference_holds_the_policy_back(start):
    free, held = start(), start(algorithm={"kl": {"coefficient": 5.0}})
    far = []
    for trainer in (free, held):
        given = groups(trainer)
        before = behaviour(trainer, [1, 2, 3, 5], 3, 1.0)[0]
        for _ in range(4):
            trainer.train(batch_of(trainer, given))
        far.append(behaviour(trainer, [1, 2, 3, 5], 3, 1.0)[0] - before)
    assert far[1] < far[0]


def test_epochs_update_as_often_and_see_the_policy_of_before(start):
    trainer = start(algorithm={"epochs": 3, "old_logprobs": "recompute"})
    report = trainer.train(batch_of(trainer))
    assert trainer.updates == 3
    assert report.metrics["ratio_max"] > 1.01, "in the last epoch the policy has left its proximal policy"
    once = start(algorithm={"old_logprobs": "recompute"})
    assert once.train(batch_of(once)).metrics["ratio_max"] == 1


def test_recomputed_old_logprobs_weigh_tokens_by_importance(start):
    trainer = start(algorithm={"old_logprobs": "recompute", "correction": {"high": 2.0}})
    plain = batch_of(trainer)
    # an engine that overstated every token by ln 2 drew them twice as often as it should have
    louder = [dataclasses.replace(m, behaviour=m.behaviour + np.float32(math.log(2))) for m in plain.micro_batches]
    norms = [
        t.train(b).grad_norm
        for t, b in (
            (trainer, plain),
            (start(algorithm={"old_logprobs": "recompute"}), dataclasses.replace(plain, shares=((tuple(louder),),))),
        )
    ]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saving_memory_recomputes_and_moves_the_weights_the_same(start, stage):
    thrifty = start(
        model={"gradient_checkpointing": True, "logit_chunk_bytes": 2048},
        engine={"zero_stage": stage},
        rescored_share=0,
    )
    plain = start()
    batch = batch_of(plain)
    calls: list[int] = []
    layer = thrifty.engine.module.causal.base_model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    reports = [trainer.train(batch) for trainer in (plain, thrifty)]
    assert len(calls) == 2, "once forward, once more in the backward pass"
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)
    assert reports[1].loss == pytest.approx(reports[0].loss, abs=1e-6)
    theirs = weights(thrifty)
    for name, value in weights(plain).items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4)


def test_bfloat16_trains_and_publishes_bfloat16(start):
    trainer = start(model={"dtype": "bfloat16"}, engine={"zero_stage": 1})
    report = trainer.train(batch_of(trainer))
    assert not report.skipped
    assert {tensor.dtype for tensor in weights(trainer).values()} == {torch.bfloat16}


def test_a_batch_of_the_demo_trains_fast_enough_to_watch(start):
    trainer = start(batch={"micro_batch_tokens": 2048})
    given = [g.model_copy(update={"seq": n}) for n, g in enumerate(groups(trainer) * 10)]
    report = trainer.train(batch_of(trainer, given, micro_batch_tokens=2048))
    assert report.tokens_trained == sum(t.num_sampled for g in given for t in g.trajectories)
    assert report.seconds < 10
