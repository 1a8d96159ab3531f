"""`foray scale` with real engines: they join and drain while the run trains; nothing is lost or trained twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.run.run_dir import read_record
from deploy.run.snapshot import read_ledger_totals
from tests.support.waiting import wait_until

STEPS = 90


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_join_and_drain_on_request_and_the_accounting_is_balanced(warm_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "scaled"
    small = ("run.id=demo", f"run.steps={STEPS}", "run.groups_per_step=4", "learner.checkpoint_every=10")
    foray = [sys.executable, "-m", "foray"]
    prepare = [*foray, "demo", "--prepare-only", "--dir", str(run_dir), "--model", str(warm_model), *small]
    subprocess.run(prepare, check=True, cwd=tmp_path, timeout=60)

    def scale(*words: str) -> dict[str, int]:
        answer = subprocess.run(
            [*foray, "scale", str(run_dir), *words, "--json"], check=True, capture_output=True, cwd=tmp_path, timeout=60
        )
        return json.loads(answer.stdout)

    def processes() -> dict[str, int]:
        return {p["name"]: p["pid"] for p in read_record(run_dir).get("processes", [])}

    log = tmp_path / "up.log"
    with log.open("wb") as out:
        up = subprocess.Popen([*foray, "up", str(run_dir / "demo.yaml")], stdout=out, stderr=out, cwd=tmp_path)
    try:
        wait_until(lambda: "reward_mean" in log.read_text(), "the first step", 120)
        before = processes()
        scale("engines=3")
        wait_until(lambda: scale()["engines"] == 3, "three engines generate", 120)
        scale("engines=1")
        wait_until(lambda: scale()["engines"] == 1 and "engine-3" not in processes(), "one engine generates", 60)
        assert {name: processes()[name] for name in before} == before, "no other process was restarted"
        assert up.wait(400) == 0, log.read_text()[-3000:]
    finally:
        up.terminate()
        up.wait(60)
    totals = read_ledger_totals(run_dir)
    assert totals is not None and totals.step == STEPS and totals.closes
    assert totals.counts["trained"] == STEPS * 4 and totals.counts["dead"] == 0
    said = log.read_text()
    assert said.count("drains and ends") == 2 and "restarting" not in said
