"""The launcher's line a step, from a file that a learner may be killed over."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.progress import StepTail, format_step

RECORD = {"step": 3, "reward_mean": 0.5, "em_mean": None, "lag_mean": 1.0, "lag_max": 2, "step_s": 2.0}
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
    line = format_step(RECORD, steps=10)
    assert line.startswith("step  3/10  reward 0.500  em 0.000  lag 1.0/2")
    assert "generated 2.0k tok/s  trained 50 tok/s" in line and "learner waits for rollouts (90%)" in line


def test_a_record_without_seconds_still_gives_a_line() -> None:
    assert "step 1/2" in format_step({"step": 1}, steps=2)
