"""Curves of runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli import main


def write_run(directory: Path, values: list[float], *, epoch: int = 1, first: int = 1, mode: str = "w") -> Path:
    directory.mkdir(exist_ok=True)
    with (directory / "metrics.jsonl").open(mode) as file:
        for step, value in enumerate(values, start=first):
            file.write(json.dumps({"step": step, "epoch": epoch, "em_mean": value, "note": "x"}) + "\n")
    return directory


def curves(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, float]]:
    assert main(["curves", "--json", *args]) == 0
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)["curves"]
    return found


def test_windows_are_means_and_an_unfinished_one_is_left_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", [0.0, 1.0, 0.5, 0.5, 9.0])
    assert curves(capsys, str(run), "--every", "2") == {str(run): {"2": 0.5, "4": 0.5}}


def test_of_a_step_trained_twice_the_surviving_epoch_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [0.0, 0.0])
    write_run(run, [1.0], epoch=2, first=2, mode="a")
    assert curves(capsys, str(run), "--every", "1") == {str(run): {"1": 0.0, "2": 1.0}}


def test_two_runs_are_compared_at_equal_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [0.1, 0.2, 0.3]), write_run(tmp_path / "b", [0.1, 0.6])
    assert main(["curves", str(a), str(b), "--every", "1"]) == 0
    assert "widest apart at step 2: 0.400; at step 2, the last of all: 0.400" in capsys.readouterr().out


def test_a_misspelt_metric_is_answered_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [0.1])
    assert main(["curves", str(run), "--metric", "em"]) == 2
    assert "choose one of em_mean, epoch, step" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "gone")]) == 2
