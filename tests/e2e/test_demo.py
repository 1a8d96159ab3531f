"""The whole ring: `foray demo` as a user runs it, with a fixed seed and fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foray.api.run import Run
from foray.demo.warmstart import BAND
from tests.support.small_machine import AVX2, small_machine

STEPS = 32
GROUPS, GROUP_SIZE = 16, 8


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_learns_to_search_through_the_whole_ring(warm_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    command = [sys.executable, "-m", "foray", "demo", "--dir", str(directory), "--model", str(warm_model), "--json"]
    done = subprocess.run([*command, f"run.steps={STEPS}"], capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    curve = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward_mean"] for step in curve]
    quarter = STEPS // 4
    assert sum(rewards[-quarter:]) / quarter - sum(rewards[:quarter]) / quarter >= 0.15, rewards

    assert summary["steps"] == STEPS and summary["groups_trained"] == STEPS * GROUPS
    assert sorted(seq for step in curve for seq in step["seqs"]) == list(range(1, STEPS * GROUPS + 1))
    assert summary["settled"] == {"trained": STEPS * GROUPS, "filtered": 0, "stale": 0, "dead": 0}
    assert 0 <= summary["lag_mean"] <= summary["lag_max"] <= 2
    assert summary["weight_updates"] >= STEPS
    # it answers from what it found, not from what it knows
    assert summary["em_after"] > summary["em_before"] + 0.2 and summary["em_after_without_search"] < 0.1
    assert json.loads((directory / "summary.json").read_text())["em_after"] == summary["em_after"]
    found = Run(directory).diagnose()
    # of the last 1,024, those that were aborted because a busy machine made them too old do not count
    aborted = round(sum(step.get("status/stale", 0.0) for step in curve) * GROUPS * GROUP_SIZE)
    assert found["findings"] == [] and found["steps"] == STEPS
    assert 1024 - aborted <= found["trajectories"] <= 1024


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_demo_that_is_broken_on_purpose_is_diagnosed(warm_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foray", "demo", "--dir", str(tmp_path / "demo"), "--model", str(warm_model)]
    broken = ["run.steps=2", "rollout.episode.max_new_tokens=8"]
    done = subprocess.run([*command, *broken], capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    command = [sys.executable, "-m", "foray", "diagnose", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "prompts: " in done.stdout and "try    raise rollout.episode.max_new_tokens" in done.stdout
    replay = next(line for line in done.stdout.splitlines() if "foray replay" in line).split("foray ", 1)[1].split()
    done = subprocess.run([sys.executable, "-m", "foray", *replay], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "truncated (turn)" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_runs_on_one_old_core_with_little_shared_memory(warm_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foray", "demo", "--dir", str(tmp_path / "demo"), "--model", str(warm_model)]
    command = small_machine([*command, "--json", "run.steps=4"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=os.environ | AVX2)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 4 and summary["settled"]["dead"] == 0 and summary["failed_after"] == 0


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_hard_demo_starts_half_way_and_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foray", "demo", "--hard", "--json", "run.steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert all(BAND[0] <= summary[f"gate_{skill}"] <= BAND[1] for skill in ("query", "evidence"))
    assert "skills at the gate" in done.stderr and "three-hop" in done.stderr
    assert summary["steps"] == 2 and summary["groups_trained"] == 2 * GROUPS and summary["failed_before"] == 0
    # it can do something of everything, and has much to learn
    assert summary["em_1hop_before"] > summary["em_3hop_before"] and 0.05 < summary["em_before"] < 0.6
    assert (tmp_path / "runs" / "demo-hard-0" / "summary.json").exists()
