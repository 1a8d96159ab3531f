"""`foray logs` and `foray runs`: entries merged by time, followed across rotation; runs found from their files."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from deploy.run.run_dir import LOCK, write_record
from foray.commands.watch import logs as command
from foray.commands.watch import runs as runs_command
from foray.watch.logs import LogFile, is_of, merged, stamp_of
from protocol.errors import UserError

NOON = datetime(2026, 1, 31, 12, 0, 0)


def at(seconds: float) -> str:
    return f"{NOON + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S,%f}"[:-3]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_record(tmp_path, {"id": "r", "state": "done"})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text(
        f"{at(1)} INFO learner: begins\nstep 1\n{at(4)} ERROR learner: failed\nTraceback\n  File x\n"
        f"{at(6)} INFO learner: on\n"
    )
    (tmp_path / "logs" / "engine-1.log").write_text(f"{at(2)} WARNING node: \x1b[2Jlate\n{at(5)} INFO node: ready")
    (tmp_path / "logs" / "redis.log").write_text(
        "7:M 31 Jan 2026 12:00:03.500 # Warning\n7:M 31 Jan 2026 12:00:03.600 * Ready\n"
    )
    return tmp_path


def show(directory: Path, *words: str, capsys: pytest.CaptureFixture[str], **more: object) -> list[str]:
    given = {"follow": False, "since": None, "level": "DEBUG", "lines": None} | more
    assert command.run(argparse.Namespace(given=[str(directory), *words], **given)) == 0
    return capsys.readouterr().out.splitlines()


def words_of(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines]


def test_entries_of_all_processes_are_merged_by_time(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(run_dir, capsys=capsys)
    expected = ["begins", "1", "\N{REPLACEMENT CHARACTER}[2Jlate", "Warning", "Ready", "failed", "Traceback", "x", "on"]
    assert words_of(lines) == expected, "the last line of engine-1 is not complete"
    assert [line.partition("|")[0].strip() for line in lines[:4]] == ["learner", "learner", "engine-1", "redis"]
    assert len({line.index("|") for line in lines}) == 1 and "\x1b" not in "".join(lines)


def test_levels_times_processes_and_the_end(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words_of(show(run_dir, capsys=capsys, level="error")) == ["failed", "Traceback", "x"]
    assert words_of(show(run_dir, "redis", "engine", capsys=capsys, level="WARNING"))[1:] == ["Warning"]
    assert words_of(show(run_dir, capsys=capsys, since="2026-01-31 12:00:05")) == ["on"]
    assert words_of(show(run_dir, capsys=capsys, lines=2)) == ["failed", "Traceback", "x", "on"]
    assert is_of("engine-1.engine", ["engine-1"]) and not is_of("engine-10", ["engine-1"])


def test_what_cannot_be_shown_says_what_to_do(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no log of 'lerner'"):
        show(run_dir, "lerner", capsys=capsys)
    with pytest.raises(UserError, match="--since 'noon'"):
        show(run_dir, capsys=capsys, since="noon")
    with pytest.raises(UserError, match="--level"):
        show(run_dir, capsys=capsys, level="LOUD")
    for path in (run_dir / "logs").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="has no logs"):
        show(run_dir, capsys=capsys)


def test_times_of_since() -> None:
    assert command.since_of("10m", NOON) == NOON.timestamp() - 600
    assert command.since_of("1.5h", NOON) == NOON.timestamp() - 5400
    assert command.since_of("9:30", NOON) == NOON.replace(hour=9, minute=30).timestamp()
    assert command.since_of("09:30:05", NOON) == NOON.replace(hour=9, minute=30, second=5).timestamp()


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-01-31 12:00:00,000 WARNING learner.main: x", "WARNING"),
        ("[2026-01-31 12:00:00 TP0] INFO: of SGLang", "INFO"),
        ("[2026-01-31 12:00:00] of SGLang", "INFO"),
        ("[2026-01-31 12:00:00,000] [ERROR] [engine.py:1:f] of DeepSpeed", "ERROR"),
        ("1:M 31 Jan 2026 12:00:00.000 # of Redis", "WARNING"),
        ("2026-13-31 12:00:00,000 INFO no month", None),
        ("step 12/60 of 2026-01-31 12:00:00", None),
    ],
)
def test_the_time_and_level_of_a_line(line: str, level: str | None) -> None:
    assert stamp_of(line) == (None if level is None else (NOON.timestamp(), level))


def test_a_log_is_followed_across_rotation(tmp_path: Path) -> None:
    path = tmp_path / "learner.log"
    log = LogFile(path)

    def new() -> list[str]:
        return [line for entry in log.read() for line in entry.lines]

    assert new() == []
    path.write_text("one\ntw")
    assert new() == ["one"] and new() == []
    with path.open("a") as file:
        file.write("o\nthree")
    assert new() == ["two"]
    os.rename(path, tmp_path / "learner.log.1")
    assert new() == [], "the new file is not there yet"
    path.write_text("four\n")
    assert new() == ["three", "four"]
    path.write_text("5\n")  # truncated in place
    assert new() == ["5"]
    log.close()
    assert new() == ["5"]
    log.close()


def test_a_clock_that_was_set_back_does_not_change_the_order_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"{at(9)} INFO a: 1\n{at(1)} INFO a: 2\n")
    (tmp_path / "b.log").write_text(f"{at(5)} INFO b: 3\n")
    files = [LogFile(tmp_path / "a.log"), LogFile(tmp_path / "b.log")]
    assert [entry.lines[0][-1] for entry in merged(files)] == ["3", "1", "2"]
    for file in files:
        file.close()


def test_follow_shows_new_lines_and_new_processes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.01)
    seen: list[str] = []
    done = threading.Event()

    def read() -> None:
        for batch in command._batches(run_dir, ["rollout", "learner"], ["INFO"], 0.0, follow=True):
            seen.extend(entry.lines[0].split()[-1] for entry in batch)
            if "late" in seen or done.is_set():
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + 20
        while "on" not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        (run_dir / "logs" / "rollout-1.log").write_text(f"{at(0)} INFO rollout: late\n")
        reader.join(20)
    finally:
        done.set()
        reader.join(5)
    assert seen == ["begins", "on", "late"]


# --- foray runs ---


def test_runs_are_listed_with_state_step_and_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, state, started in (("old", "done", 100.0), ("lives", "running", 300.0), ("deep/er", "running", 200.0)):
        write_run(tmp_path / name, state, started)
    (tmp_path / "other").mkdir()
    with (tmp_path / "lives" / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert runs_command.run(argparse.Namespace(directory=tmp_path, json=True)) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(one["run"], one["state"]) for one in found] == [
            ("lives", "running"),
            ("er", "killed"),
            ("old", "done"),
        ]
        assert found[0] == {
            "run": "lives", "state": "running", "step": 2, "steps": 30, "reward": 0.25, "started": 300.0,
            "directory": str(tmp_path / "lives"),
        }  # fmt: skip
        runs_command.run(argparse.Namespace(directory=tmp_path, json=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "reward", "started", "ago", "directory"]
    assert lines[1].split()[:4] == ["lives", "running", "2/30", "0.250"] and lines[1].endswith("lives")


def write_run(directory: Path, state: str, started: float) -> None:
    directory.mkdir(parents=True)
    write_record(directory, {"id": directory.name, "state": state, "started": started, "updated": started})
    (directory / "resolved.yaml").write_text("run: {id: r, steps: 30}\n")
    steps = [{"step": n, "epoch": 1, "reward_mean": n / 8} for n in (1, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_no_runs_and_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs_command.run(argparse.Namespace(directory=tmp_path, json=False)) == 0
    assert "no runs in" in capsys.readouterr().out
    with pytest.raises(UserError, match="is not a directory"):
        runs_command.run(argparse.Namespace(directory=tmp_path / "x", json=False))


def test_a_number_of_entries_below_0_is_refused(run_dir: Path) -> None:
    args = argparse.Namespace(given=[str(run_dir)], follow=False, since=None, level="DEBUG", lines=-5)
    with pytest.raises(UserError, match="--lines -5 is below 0"):
        command.run(args)


def test_a_run_record_that_is_no_object_does_not_hide_the_others(tmp_path: Path) -> None:
    for name, text in (("a", '{"state": "done"}'), ("b", "[1]"), ("c", '{"started": null, "id": 7}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert {one.run: one.state for one in runs_command.find_runs(tmp_path)} == {
        "a": "done",
        "b": "killed",
        "7": "killed",
    }
