"""The messages that users see after faults, from real processes (`messages.py` makes each situation)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was printed in each situation."""
    program = [sys.executable, str(Path(__file__).parent / "messages.py")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=400, env=env, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    parts = re.split(r"^=== ([a-z-]+): .*$", done.stdout, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def in_order(text: str, *patterns: str) -> None:
    """Every pattern is there, each after the one before."""
    at = 0
    for pattern in patterns:
        found = re.compile(pattern, re.M).search(text, at)
        assert found, f"{pattern!r} is not there, or too early:\n{text}"
        at = found.end()


@pytest.mark.fault(13)
def test_a_second_learner_is_refused_and_with_takeover_the_first_one_is(said: dict[str, str]) -> None:
    in_order(
        said["two-learners"],
        r"^error: run demo is held by epoch 1, process (\d+) on \S+, since \S+ \S+ UTC, renewed \d\.\d s ago, which is",
        r"^  why: two learners must not train one run",
        r"^   do: stop it \(kill \d+: .*--takeover",
        r"^\[exit code 2\]",
        r"^error: fenced: this learner \(epoch 1, process \d+\) was replaced by epoch 2, process \d+ on .*UTC, renewed",
        r"^  why: its lease expired",
        r"^   do: nothing, if",
        r"^\[exit code 75\]",
    )


@pytest.mark.fault(11)
def test_a_resumed_learner_reports_who_took_over_and_when(said: dict[str, str]) -> None:
    in_order(
        said["woken"],
        r"^\$ .*stopped for longer than learner.lease_s",
        r"^error: fenced: .*\(epoch 1, .*replaced by epoch 2, process \d+ on \S+, since 20\d\d-\d\d-\d\d .*UTC",
        r"^\[exit code 75\]",
    )


@pytest.mark.fault(15)
def test_a_half_loaded_engine_is_named_in_the_status_with_the_reason(said: dict[str, str]) -> None:
    in_order(
        said["half-loaded-engine"],
        r"^run demo: (starting|training), NOT healthy",
        r"^problem: +engine gpu-0 is quarantined: 1\.\d+ is loaded in part: refused at gpu-0: CUDA out of memory",
        r"^   do: +it gets no requests",
        r"^engine +gpu-0: quarantined, version 0\.0",
        r"^\[exit code 1\]",
    )


@pytest.mark.fault(35)
def test_a_group_that_crashes_the_learner_is_a_dead_letter_after_three_starts(said: dict[str, str]) -> None:
    in_order(
        said["poisoned-group"],
        r"ended with \[-11, -11, -11\]",
        r"\(seq 9\) is unusable: poison: the learner crashed 3 times while reading this entry; .*`foray dlq show 9`",
        r"^ *9 .*poison",
        r"^\[exit code 0\]",
    )


@pytest.mark.fault(39)
def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_stop_the_learner(said: dict[str, str]) -> None:
    in_order(
        said["nan-step"],
        r"skipped the batch of seqs .*, the policy is unchanged: its loss or a gradient is not finite",
        r"^error: 3 batches in a row were not trained in full: their loss or a gradient is not finite",
        r"^  why: the policy has diverged, or the data is broken\. No update that was not finite changed the weights",
        r"^   do: inspect them in runs/demo/skipped",
        r"^\[exit code 65\]",
        r"^groups-00001\.bin",
        r"^step_5\.e1",
    )


@pytest.mark.fault(25)
def test_a_full_redis_is_waited_for_and_named(said: dict[str, str]) -> None:
    in_order(
        said["redis-full"],
        r"issuing tasks is paused: Redis is full \(maxmemory reached\)",
        r"^problem: +Redis uses",
        r"^   do: +raise maxmemory",
        r"with room again it went on by itself",
    )


@pytest.mark.fault(41, 42)
def test_a_full_disk_is_named_and_says_what_goes_on_and_what_does_not(said: dict[str, str]) -> None:
    in_order(
        said["disk-full"],
        r"checkpoint step_\d+\.e1 could not be written: .*(No space left|too large).*; the checkpoint of step \d+",
        r"3 checkpoints failed: issuing tasks is paused until one succeeds\. Free disk space in runs/demo",
        r"^problem: +the last \d+ checkpoints could not be written; the newest is of step \d+: "
        r".*(No space left|too large)",
        r"^   do: +free space on the disk of run\.dir",
        r"^error: cannot write the weights of version 1\.4",
        r"^  why: they were not announced: the engines keep the previous version",
        r"^   do: free disk space for runs/demo and start again",
        r"^\[exit code 2\]",
    )
