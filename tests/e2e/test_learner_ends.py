"""The learner of a whole run ends early: by SIGKILL, and then by SIGTERM, which is once more than it may."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.run.run_dir import read_record
from deploy.run.snapshot import read_ledger_totals
from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model
from tests.support.waiting import wait_until

SMALL = (
    "run.steps=400",
    "run.groups_per_step=2",
    "run.group_size=2",
    "learner.checkpoint_every=2",
    "learner.lease_s=3",
)


def trained(run_dir: Path) -> int:
    """Steps in the newest checkpoint."""
    totals = read_ledger_totals(run_dir)
    return totals.step if totals else 0


def learner(run_dir: Path) -> int:
    """Process id of the learner."""
    return next(int(p["pid"]) for p in read_record(run_dir).get("processes", ()) if p["name"] == "learner")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_that_ends_early_resumes_and_the_run_is_never_called_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(new_model(0), tmp_path / "model")
    run_dir = tmp_path / "run"
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(tmp_path / "model"), *SMALL]) == 0
    command = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")]
    with (tmp_path / "up.log").open("w") as log:
        up = subprocess.Popen([*command, "launch.restart_learner=1"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=1):
            before = trained(run_dir)
            wait_until(lambda before=before: trained(run_dir) >= before + 2 or up.poll() is not None, "it trains", 200)
            os.kill(learner(run_dir), number)
            wait_until(
                lambda restarts=restarts: (
                    read_record(run_dir).get("restarts", {}).get("learner") == restarts or up.poll() is not None
                ),
                "it is started again, or the run has ended",
                60,
            )
        code = up.wait(120)
    finally:
        up.kill()
    said = (tmp_path / "up.log").read_text()
    assert code == 1 and "interrupted after" in said and "\nerror: learner was stopped by SIGTERM (after 1" in said, (
        said
    )
    assert "learner was killed by SIGKILL (out of memory?): restarting it (1 of 1 per hour)" in said
    assert foray(["status", str(run_dir)]) == 1
    assert ": interrupted, NOT healthy" in capsys.readouterr().out

    steps = f"run.steps={trained(run_dir) + 2}"
    done = subprocess.run([*command, steps], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0 and "done after" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, steps], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and "already done" in done.stdout and "retriever" not in done.stdout, done.stdout
