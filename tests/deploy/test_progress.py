"""The launcher's step lines, from a file whose writer may be killed."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.run.history import StepTail
from learner.observability.reporting import step_line

RECORD = {"step": 3, "reward_mean": 0.5, "reward/em": 0.25, "lag_mean": 1.0, "lag_max": 2, "step_s": 2.0}
RECORD |= {"tokens_generated": 4000, "tokens_trained": 100, "seconds": {"wait": 1.8, "compute": 0.2, "unheard": 9.0}}


def test_only_new_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n")
    tail = StepTail(path)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"step"')
        file.flush()
        assert [r["step"] for r in tail.read()] == [2]
        file.write(": 3}\n")
    assert [r["step"] for r in tail.read()] == [3] and tail.last["step"] == 3


def test_a_line_that_a_killed_learner_left_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = StepTail(path)
    path.write_text('{"step": 1, "rewa{"step": 1}\n{"step": 2}\n')
    assert [r["step"] for r in tail.read()] == [2]


def test_the_line_says_reward_lag_rates_and_the_bottleneck() -> None:
    line = step_line(RECORD | {"tokens_generated_per_s": 1091.0}, steps=10)
    assert line.startswith(
        "step  3/10  reward_mean 0.500  reward/em 0.250  lag_mean 1.0  lag_max 2  generated 1.1k tok/s"
    )
    assert line.endswith("trained 50 tok/s  2.0 s  learner waits for rollouts (90%)")


def test_what_was_not_measured_is_not_in_the_line() -> None:
    line = step_line(RECORD | {"reward/em": None}, steps=10)
    assert "em" not in line.replace("mean", "") and "generated" not in line
    assert step_line({"step": 1}, steps=2) == "step 1/2"
    replayed = step_line(RECORD | {"seconds": {"compute": 1.9, "checkpoint": 0.0}}, steps=10)
    assert replayed.endswith("trained 50 tok/s  2.0 s"), "a replay has no rollouts that could wait"
