"""Manually started processes: engines join and leave, an engine, the retriever (which comes back at another port) and
the learner are killed, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from by_hand import Shells

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.keys import Keys
from protocol.ledger import Ledger
from protocol.messages import NodeState
from tests.support.waiting import wait_until

STEPS, GROUPS = 60, 8
SMALL = ("run.id=demo", f"run.steps={STEPS}", f"run.groups_per_step={GROUPS}", "learner.checkpoint_every=5")


def steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return json.loads(path.read_text().splitlines()[-1])["step"] if path.exists() and path.stat().st_size else 0


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_engines_retriever_and_learner_may_be_killed_at_any_time(warm_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "hand"
    prepare = [sys.executable, "-m", "foray", "demo", "--prepare-only", "--dir", str(run_dir)]
    subprocess.run([*prepare, "--model", str(warm_model), *SMALL], check=True, cwd=tmp_path, timeout=60)
    keys = Keys("demo")
    with Shells(tmp_path, run_dir / "demo.yaml") as shells:
        port = shells.redis_url.rsplit(":", 1)[1].split("/")[0]
        shells.start("redis", "-m", "foray", "redis", "--port", port, "--dir", str(tmp_path / "redis"))
        survivors = {
            "rollout": shells.process("rollout", "rollout_server"),
            "redis": shells.children["redis"],
        }
        shells.process("retriever", "retriever")
        shells.process("engine-a", "rollout_server.node", "engine.id=a")
        shells.process("learner", "learner")
        wait_until(lambda: steps_done(run_dir) >= 4, "the first steps", 120)

        shells.process("engine-b", "rollout_server.node", "engine.id=b")
        wait_until(lambda: ready(shells, keys, "b"), "the second engine is ready", 60)
        assert shells.engines(keys)["b"].step >= 1, "a late engine joins at the version of the day, not at the first"
        wait_until(lambda: "b" in engines_used(run_dir), "the second engine takes traffic", 60)

        shells.kill("retriever")
        survivors["retriever"] = shells.process("retriever-b", "retriever")  # at another port
        shells.kill("engine-a")
        before = steps_done(run_dir)
        wait_until(lambda: steps_done(run_dir) >= min(before + 4, STEPS), "steps without the killed engine", 90)
        shells.kill("learner")
        killed_at = steps_done(run_dir)
        learner = shells.process("learner", "learner")
        wait_until(lambda: learner.poll() is not None, "the second learner ends", 180)
        assert learner.returncode == 0, shells.log("learner")[-3000:]
        assert all(child.poll() is None for child in survivors.values()), "nothing else was restarted"

    checkpoint = Checkpoints(run_dir / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == STEPS
    ledger = Ledger.from_state(checkpoint.facts["ledger"])
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    assert counts["trained"] == STEPS * GROUPS and not ledger.above and ledger.watermark == sum(counts.values())
    entries = list(read_journal(run_dir / "journal", lineage=checkpoint.lineage))
    times = Counter(entry.group.seq for entry in entries)
    assert max(times.values()) == 1 and len(times) == STEPS * GROUPS
    assert len(checkpoint.lineage) == 2 and checkpoint.lineage[1].step <= killed_at
    print(f"killed at step {killed_at}, resumed at {checkpoint.lineage[1].step}; {counts}; engines {used(entries)}")


def ready(shells: Shells, keys: Keys, name: str) -> bool:
    info = shells.engines(keys).get(name)
    return info is not None and info.state is NodeState.READY and info.step >= 1


def engines_used(run_dir: Path) -> set[str]:
    """Engines whose tokens have been trained."""
    return set(used(list(read_journal(run_dir / "journal"))))


def used(entries: list) -> Counter[str]:
    return Counter(s.engine for e in entries for t in e.group.trajectories for s in t.segments if s.engine)
