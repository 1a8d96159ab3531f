"""A small ring: every process of a run, three steps with an untrained model, and the accounting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.messages import Owner

STEPS, GROUPS = 3, 2
SMALL = (f"run.steps={STEPS}", f"run.groups_per_step={GROUPS}", "run.group_size=4", "learner.checkpoint_every=2")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_trains_every_group_once_on_the_tokens_of_its_engine(tmp_path: Path) -> None:
    save_model(new_model(0), tmp_path / "model")
    run_dir = tmp_path / "run"
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(tmp_path / "model"), *SMALL]) == 0
    up = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")]
    done = subprocess.run(up, cwd=tmp_path, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = Checkpoints(run_dir / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == STEPS
    assert checkpoint.facts["ledger"]["counts"]["trained"] == STEPS * GROUPS and not checkpoint.facts["ledger"]["above"]
    groups = [entry.group for entry in read_journal(run_dir / "journal", lineage=checkpoint.lineage)]
    assert sorted(group.seq for group in groups) == list(range(1, STEPS * GROUPS + 1))
    sampled = [s for group in groups for t in group.trajectories for s in t.segments if s.owner is Owner.POLICY]
    assert sampled and all(len(s.logprobs) == len(s.ids) > 0 and s.engine for s in sampled)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert {step["devices"] for step in steps} == {2}, "a rank of the learner, one of the engine"
    assert len(list((run_dir / "weights").iterdir())) > 1, "weights were published"
