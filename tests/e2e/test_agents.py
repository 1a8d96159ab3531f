"""A ring whose agents fail in every way, while an engine is killed: it trains, and its accounting is balanced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.ledger import Ledger
from protocol.messages import Owner, Status
from tests.support.waiting import wait_until

AGENT = Path(__file__).parents[1] / "support" / "wild_agent.py"
STEPS, GROUPS = 4, 4
CAUSES = {"killed": "agent_exit", "hangs": "agent_timeout", "garbage": "agent_result"}


def steps_of(run: Path) -> list[dict[str, object]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_ring_trains_with_agents_that_fail_in_every_way(warm_model: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    agent = {"type": "command", "command": [sys.executable, str(AGENT), str(notes)], "deadline_s": 15}
    chosen = [f"run.steps={STEPS}", f"run.groups_per_step={GROUPS}", "run.group_size=8", "launch.engines=2"]
    chosen.append(f"rollout.agent={json.dumps(agent | {'gateway_search': True})}")
    foray = [sys.executable, "-m", "foray"]
    prepare = [*foray, "demo", "--prepare-only", "--dir", str(run), "--model", str(warm_model), *chosen]
    subprocess.run(prepare, check=True, cwd=tmp_path, timeout=300)
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen([*foray, "up", str(run / "demo.yaml")], cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_until(lambda: len(steps_of(run)) >= 1 or up.poll() is not None, "the first step", 400)
        (engine,) = [
            p["pid"] for p in json.loads((run / "run.json").read_text())["processes"] if p["name"] == "engine-1"
        ]
        os.kill(engine, signal.SIGKILL)
        code = up.wait(500)
    finally:
        up.terminate()
        up.wait(60)
    # the learner compares the tokens generated with those settled: a difference is exit code 1
    assert code == 0, (tmp_path / "up.log").read_text()[-4000:]

    checkpoint = Checkpoints(run / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == STEPS
    ledger = Ledger.from_state(checkpoint.facts["ledger"])
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    assert counts["trained"] == STEPS * GROUPS and not ledger.above and ledger.watermark == sum(counts.values())
    groups = [entry.group for entry in read_journal(run / "journal", lineage=checkpoint.lineage)]
    trajectories = [t for group in groups for t in group.trajectories]
    played = Counter(note.name.partition("-")[0] for note in notes.iterdir())
    causes = Counter(t.cause for t in trajectories if t.status is Status.FAILED)
    print(f"{dict(played)}; causes {dict(causes)}; {counts}")
    assert set(causes) <= set(CAUSES.values())
    assert {CAUSES[kind] for kind in CAUSES if played[kind]} >= set(causes) and len(causes) >= 2
    # more than one sequence: of the agent that edits its history, and of the one that asks again after a repetition
    more = [t for t in trajectories if sum(s.owner is Owner.PROMPT for s in t.segments) > 1]
    begun = {s.finish_reason for t in more for s in t.segments[1:] if s.owner is Owner.PROMPT}
    assert begun <= {"message 0 differs", "same prompt again"}
    # after a slow step tokens are too old
    settled = sum(step["tokens_trained"] + step["tokens_stale"] for step in steps_of(run))  # type: ignore[operator]
    assert settled == sum(t.num_sampled for t in trajectories if t.status.is_valid)
    assert {note.read_text() for note in notes.glob("late-*")} <= {"", "404"}
    assert (run / "logs" / "engine-1.log").exists() and json.loads((run / "run.json").read_text())["restarts"]
