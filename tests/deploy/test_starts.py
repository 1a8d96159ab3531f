"""What `foray up` refuses, tells and leaves before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.config import RunConfig, load_config
from deploy.doctor.finding import Finding, NotReady
from deploy.doctor.run import resume
from deploy.hardware.speed import with_dtypes
from deploy.run.addresses import anchored
from deploy.run.run_dir import RECORD, RESOLVED, write_record
from foray.commands.up import up
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.resume import defining_settings
from learner.data.questions import load_questions
from learner.data.sampler import Sampler
from protocol.errors import UserError
from protocol.ledger import Ledger
from protocol.versions import PolicyVersion


def configured(files: Path, *overrides: str) -> RunConfig:
    given = (f"run.dir={files}/runs/mine", f"run.model={files}/model", f"retriever.corpus={files}/corpus.jsonl")
    return load_config(None, [*given, f"learner.questions={files}/questions.jsonl", "run.steps=10", *overrides])


@pytest.fixture
def stopped(run_files: Path) -> Path:
    """A run with a checkpoint of step 9 and the settings of its last start."""
    config = with_dtypes(configured(run_files))
    sampler = Sampler(load_questions(config.learner.questions), config.run.seed)
    facts: dict[str, Any] = {"run": config.run.id, "sampler": sampler.fingerprint, "ledger": Ledger().to_state()}
    facts["defining"] = defining_settings(config.run, config.learner)
    Checkpoints(config.run.checkpoint_dir, 1).write(
        facts,
        step=9,
        epoch=1,
        lineage=[PolicyVersion(1, 0)],
        save=lambda path: None,
        confirm=lambda: None,
    )
    (config.run.dir / RESOLVED).write_text(anchored(config).to_yaml())
    (config.run.dir / RECORD).write_text("{}")
    return run_files


def found(files: Path, *overrides: str) -> list[Finding]:
    return list(resume(configured(files, *overrides)))


def test_the_same_settings_and_more_steps_resume_without_a_word(stopped: Path) -> None:
    assert not found(stopped) and not found(stopped, "run.steps=900")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.steps=8", "run.steps is 8, but the checkpoint is at step 9"),
        ("run.seed=77", "the questions or run.seed differ"),
        ("run.id=other", "belongs to run 'run'"),
        ("run.group_size=3", "run.group_size 8, not 3"),
        ("run.groups_per_step=3", "run.groups_per_step"),
        ("learner.algorithm.type=ppo", "learner.algorithm.type grpo, not ppo"),
        ("learner.model.lora.rank=8", "learner.model.lora.rank 0, not 8"),
        (
            "learner.model.dtype=bfloat16 learner.engine.zero_stage=1",
            "learner.model.dtype float32, not bfloat",
        ),
    ],
)
def test_what_the_checkpoint_rules_out_is_refused_and_nothing_is_started(
    stopped: Path, override: str, says: str
) -> None:
    before = set(stopped.rglob("*"))
    said: list[str] = []
    with pytest.raises(NotReady) as refused:
        up(configured(stopped, *override.split()), said.append, again="foray up")
    assert says in refused.value.render() and refused.value.render().endswith("nothing was started")
    assert not said and set(stopped.rglob("*")) - before <= {stopped / "runs" / "mine" / "launcher.lock"}


def test_another_model_is_refused_but_a_moved_one_is_not(stopped: Path) -> None:
    (stopped / "model").rename(stopped / "moved")
    assert [one.check for one in found(stopped, f"run.model={stopped}/moved")] == ["settings"]
    weights = stopped / "moved" / "model.safetensors"
    other = stopped / "other"
    other.mkdir()
    (other / weights.name).write_bytes(weights.read_bytes()[:-1] + b"?")
    assert "run.model " in found(stopped, f"run.model={other}")[0].detail


def test_other_settings_that_changed_are_told(stopped: Path) -> None:
    (one,) = found(stopped, "run.max_lag=7", "learner.optim.lr=1e-3")
    assert one.verdict == "warn" and "run.max_lag" in one.detail and "-> 7" in one.detail
    assert "learner.optim.lr" in one.detail and "rollout.search" not in one.detail
    (stopped / "runs" / "mine" / RECORD).unlink()  # `foray submit` has no start yet
    assert not found(stopped, "run.max_lag=7")


def test_a_run_that_is_done_says_so_and_starts_nothing(stopped: Path) -> None:
    config = configured(stopped, "run.steps=9")
    said: list[str] = []
    write_record(config.run.dir, {"state": "done"})
    code, summary = up(config, said.append)
    assert code == 0 and summary["state"] == "done"
    assert said == ["run run is already done: 9 steps; to train further, raise run.steps"]


def test_a_first_start_that_is_refused_leaves_nothing(run_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORAY_REDIS_URL", raising=False)
    said: list[str] = []
    for overrides in (["learner.questions=/nowhere.jsonl"], ["launch.redis=configured"]):
        with pytest.raises(UserError):
            up(configured(run_files, *overrides), said.append)
        assert not said and not (run_files / "runs" / "mine").exists()
