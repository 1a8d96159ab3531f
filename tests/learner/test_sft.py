"""Supervised training: the loss is the plain one, the updates are AdamW's, and a stop at any point changes nothing."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from learner.config.learner import BatchSettings, LearnerSettings
from learner.config.sft import SftSettings
from learner.engine.optimizer import learning_rate
from learner.model.loading import load_policy
from learner.sft.batches import SftExample, examples_of_update, held_out, micro_batches, num_updates
from learner.sft.record import RECORD, SftPlan, SftProgress
from learner.sft.training import SftFailed, _SftTrainer, train
from protocol.errors import UserError
from protocol.runtime import number_format
from protocol.runtime.number_format import CpuSpeed
from tests.support.forks import Zygote
from tests.support.sft_model import tiny_chat_model
from tests.support.tiny_families import write_family

ROOT = Path(__file__).parents[2]
SETTINGS = {"dtype": "float32", "lr": 0.01, "batch_size": 4, "epochs": 2, "weight_decay": 0.1}


def example(seed: int, length: int) -> SftExample:
    """Tokens of the tiny model, about a third of them trained, the last one not."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.3
    mask[[length // 2, -1]] = True, False
    return SftExample.of(rng.integers(0, 40, length).tolist(), mask.tolist(), f"question {seed}")


EXAMPLES = [example(seed, 5 + 7 * seed % 23) for seed in range(11)]


@pytest.fixture
def plan_of(tiny_qwen: Path, tmp_path: Path) -> Callable[..., SftPlan]:
    def make(name: str = "out", *, batch: BatchSettings | None = None, **settings: Any) -> SftPlan:
        trainer = LearnerSettings(batch=batch or BatchSettings(micro_batch_tokens=40))
        given = SftSettings.model_validate(SETTINGS | settings)
        return SftPlan.of(
            EXAMPLES, model=tiny_qwen, out=tmp_path / name, settings=given, trainer=trainer, seed=7
        )  # fmt: skip

    return make


def run(plan: SftPlan, stop_at: int = 0, crash_at: int = 0) -> SftProgress:
    seen = SftProgress()

    def report(now: SftProgress) -> None:
        nonlocal seen
        seen = now
        if crash_at and now.step >= crash_at:
            raise KeyboardInterrupt

    return train(plan, report, lambda: bool(stop_at) and seen.step >= stop_at)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def plain_loss(model: Any, examples: list[SftExample]) -> torch.Tensor:
    """The mean loss of the trained tokens, each conversation by itself through transformers."""
    losses = []
    for one in examples:
        logits = model(input_ids=torch.from_numpy(one.ids)[None], use_cache=False).logits[0]
        logs = torch.log_softmax(logits.float(), -1)
        losses += [-logs[at - 1, one.ids[at]] for at in one.trained.tolist()]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "batch", [BatchSettings(micro_batch_tokens=40), BatchSettings(micro_batch_tokens=64, row_tokens=32)]
)
def test_micro_batches_have_every_trained_token_once(batch: BatchSettings) -> None:
    parts = list(micro_batches(EXAMPLES, batch))
    assert len(parts) > 2 and all(part.ids.size <= batch.micro_batch_tokens for part in parts)
    assert (max(int(part.document_ids.max()) for part in parts) > 0) == bool(batch.row_tokens)
    wanted = Counter((tuple(e.ids[:at].tolist()), int(e.ids[at])) for e in EXAMPLES for at in e.trained.tolist())
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for part in parts:
        ids, document_ids, positions = part.ids.ravel(), part.document_ids.ravel(), part.positions.ravel()
        for at, target in zip(part.index.tolist(), part.targets.tolist(), strict=True):
            start = at - int(positions[at])
            assert document_ids[at] >= 0 and len(set(document_ids[start : at + 1].tolist())) == 1
            found[tuple(ids[start : at + 1].tolist()), target] += 1
    assert found == wanted
    assert sum(part.tokens for part in parts) == sum(len(e.inputs) for e in EXAMPLES)


def test_each_epoch_has_every_example_once_in_another_order() -> None:
    assert (num_updates(11, 4, 2, 0), num_updates(11, 4, 2, 5), num_updates(11, 4, 2, 99)) == (6, 5, 6)
    epochs = [[n for u in range(3) for n in examples_of_update(3 * e + u, 11, 4, 7)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11)) and epochs[0] != epochs[1]
    assert [len(examples_of_update(u, 11, 4, 7)) for u in range(3)] == [4, 4, 3]
    assert examples_of_update(0, 11, 4, 7) != examples_of_update(0, 11, 4, 8)


def test_the_held_out_share_depends_on_the_question_alone() -> None:
    many = [replace(EXAMPLES[0], key=f"q{n}") for n in range(1000)]
    assert 160 < sum(held_out(one, 0.2) for one in many) < 240
    chosen = [one.key for one in many if held_out(one, 0.2)]
    assert chosen == [one.key for one in many if held_out(replace(one, ids=EXAMPLES[1].ids), 0.2)]
    assert set(chosen) < {one.key for one in many if held_out(one, 0.4)} and not any(held_out(o, 0.0) for o in many)


@pytest.mark.parametrize("row_tokens", [0, 32])
def test_training_is_plain_adamw_on_the_plain_loss(plan_of: Callable[..., SftPlan], row_tokens: int) -> None:
    plan = plan_of(batch=BatchSettings(micro_batch_tokens=64, row_tokens=row_tokens))
    losses: list[float] = []
    train(plan, lambda now: losses.append(now.last_loss), lambda: False)
    model = transformers.AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    expected = []
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan.settings, step, plan.steps)
        optimizer.zero_grad()
        loss = plain_loss(model, [plan.examples[n] for n in examples_of_update(step, len(plan.examples), 4, 7)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses[1:] == pytest.approx(expected, rel=1e-4) and expected[-1] < expected[0] - 0.3
    written, trained = weights(plan.out), model.state_dict()
    assert all(torch.allclose(tensor, trained[name], atol=2e-4) for name, tensor in written.items())


def test_a_stop_or_a_crash_at_any_point_changes_nothing(plan_of: Callable[..., SftPlan]) -> None:
    straight = plan_of("straight")
    whole = run(straight)
    assert whole.step == whole.steps == 6 and not straight.folder.exists()
    stopped = plan_of("stopped")
    for step in (1, 2, 5):
        assert run(stopped, stop_at=step).step == step and not stopped.out.exists()
    crashed = plan_of("crashed", checkpoint_s=0)
    for step in (2, 3, 4):  # the checkpoint of the step before is the last one
        with pytest.raises(KeyboardInterrupt):
            run(crashed, crash_at=step)
    unsaved = plan_of("unsaved", checkpoint_s=3600)
    with pytest.raises(KeyboardInterrupt):
        run(unsaved, crash_at=5)  # begins again
    for plan in (stopped, crashed, unsaved):
        again = run(plan)
        assert {name: getattr(again, name) for name in ("tokens", "trained_tokens", "first_loss", "last_loss")} == {
            name: getattr(whole, name) for name in ("tokens", "trained_tokens", "first_loss", "last_loss")
        }
        found, expected = weights(plan.out), weights(straight.out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), plan.out


def test_the_result_is_complete_and_another_start_finds_it(plan_of: Callable[..., SftPlan]) -> None:
    plan = plan_of(eval_share=0.3, epochs=3)
    assert plan.finished() is None and 0 < len(plan.evaluated) < len(EXAMPLES)
    done = run(plan)
    assert [step for step, _ in done.evals] == [plan.steps / 3, plan.steps * 2 / 3, plan.steps]
    model = transformers.AutoModelForCausalLM.from_pretrained(plan.out)
    assert done.evals[-1][1] == pytest.approx(plain_loss(model, list(plan.evaluated)).item(), rel=1e-4)
    assert plan.finished() == done
    assert json.loads((plan.out / RECORD).read_text())["steps"] == plan.steps
    load_policy(plan.out, LearnerSettings().model)
    with pytest.raises(UserError, match="already exists"):
        plan_of(eval_share=0.3, epochs=3, lr=0.02).finished()
    other = plan_of("other")
    other.out.mkdir()
    with pytest.raises(UserError, match="already exists"):
        other.finished()


def test_checkpoints_of_another_training_are_refused(plan_of: Callable[..., SftPlan]) -> None:
    run(plan_of(), stop_at=2)
    with pytest.raises(UserError, match="checkpoints of another training"):
        run(plan_of(lr=0.02))
    assert run(plan_of(checkpoint_s=5)).step == 6


def test_two_processes_do_not_train_one_model(plan_of: Callable[..., SftPlan]) -> None:
    plan = plan_of()

    def second(now: SftProgress) -> None:
        with pytest.raises(UserError, match="another process trains"):
            run(plan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(plan, second, lambda: False)


def test_bfloat16_keeps_changes_smaller_than_its_precision(plan_of: Callable[..., SftPlan]) -> None:
    """With 8 bits a weight does not change by a thousandth of itself; 20 such updates must add up."""
    plan = plan_of(dtype="bfloat16", lr=1e-4, schedule="constant", warmup_fraction=0.0, epochs=8, weight_decay=0.0)
    trainer = _SftTrainer(plan)
    before = {name: master.clone() for name, master in trainer._masters.items()}
    done = trainer.run(lambda now: None, lambda: False)
    assert done.dtype == "bfloat16" and done.step == 24
    for name, master in trainer._masters.items():
        weight = trainer._weights[name]
        assert (master.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(weight, master.bfloat16())
        assert 5e-5 < (master - before[name]).abs().max() < 5e-3
    assert done.last_loss < done.first_loss
    trainer.write()
    written = weights(plan.out)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((plan.out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "hunyuan_v1_moe", "olmo_hybrid"])
def test_weights_that_bfloat16_would_round_are_refused(
    kind: str, plan_of: Callable[..., SftPlan], tmp_path: Path
) -> None:
    plan = plan_of(batch=BatchSettings(row_tokens=0), dtype="bfloat16")
    plan = replace(plan, model=write_family(kind, tmp_path / kind))
    with pytest.raises(UserError, match="weights in float32") as caught:
        _SftTrainer(plan)
    assert caught.value.todo == "set sft.dtype to float32"
    _SftTrainer(replace(plan, settings=plan.settings.model_copy(update={"dtype": "float32"})))


def test_bfloat16_continues_exactly_too(plan_of: Callable[..., SftPlan]) -> None:
    straight, stopped = plan_of("straight", dtype="bfloat16"), plan_of("stopped", dtype="bfloat16")
    run(straight)
    run(stopped, stop_at=3)
    run(stopped)
    expected = weights(straight.out)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(stopped.out).items())


def test_a_gradient_that_is_not_finite_ends_it_and_keeps_the_checkpoint(plan_of: Callable[..., SftPlan]) -> None:
    plan = plan_of()
    run(plan, stop_at=2)
    trainer = _SftTrainer(plan)
    with torch.no_grad():
        next(iter(trainer._weights.values()))[:] = float("nan")
    with pytest.raises(SftFailed, match=r"update 3 is not finite: lower sft\.lr"):
        trainer.run(lambda now: None, lambda: False)
    assert run(plan).step == 6


def test_a_training_continues_in_the_dtype_that_it_began_with(
    plan_of: Callable[..., SftPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "SMALL", 1)
    monkeypatch.setattr(number_format, "measure", lambda torch: CpuSpeed("a", True, 1.0, 9.0))
    run(plan_of("stopped", dtype="auto"), stop_at=3)
    monkeypatch.setattr(number_format, "measure", lambda torch: CpuSpeed("another machine", False, 9.0, 1.0))
    assert run(plan_of("stopped", dtype="auto")).dtype == "bfloat16"
    assert run(plan_of("new", dtype="auto")).dtype == "float32"


@pytest.mark.slow
def test_the_command_killed_while_it_trains_ends_with_the_same_weights(tmp_path: Path, zygote: Zygote) -> None:
    model = tiny_chat_model(tmp_path / "model")
    demonstrations = tmp_path / "demos.jsonl"
    lines = [{"prompt": f"What is {n} and {n}? ", "completion": f"It is {2 * n}."} for n in range(40)]
    demonstrations.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(name: str) -> int:
        words = [str(demonstrations), "--model", str(model), "--out", str(tmp_path / name), "sft.dtype=float32"]
        words += ["sft.checkpoint_s=0", "sft.epochs=20", "sft.batch_size=4", "learner.engine.threads=1"]
        return zygote.start(str(ROOT / "foray" / "__main__.py"), ["sft", *words], tmp_path / f"{name}.log", {}, ROOT)

    assert zygote.wait(start("straight"), 100) == 0, (tmp_path / "straight.log").read_text()
    current = tmp_path / ".killed.training" / "checkpoints" / "CURRENT"
    kills = 0
    for least in (5, 60, 120):
        pid, deadline = start("killed"), time.monotonic() + 60
        while not (current.is_file() and int(current.read_text().split("_")[1].split(".")[0]) >= least):
            assert time.monotonic() < deadline and zygote.ended(pid) is None, (tmp_path / "killed.log").read_text()
            time.sleep(0.005)
        zygote.kill(pid)
        kills += zygote.wait(pid, 20) == -signal.SIGKILL
    assert kills == 3 and not (tmp_path / "killed").exists()
    assert zygote.wait(start("killed"), 100) == 0
    expected = weights(tmp_path / "straight")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "killed").items())
    assert not (tmp_path / ".killed.training").exists()
