"""`make gpu-check`: stages, their record, what is skipped; the stages themselves run with FORAY_GPU_CHECK=cpu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pages.hardware import stage_table
from protocol.errors import ForayError
from tests.gpu import check as module
from tests.gpu.check import STAGES, Machine, Stage, main, run_stage


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three stages, of which the second fails; the names of those that ran."""
    ran: list[str] = []

    def stage(name: str, *, fails: bool = False) -> Stage:
        def run(on: Machine) -> dict[str, object]:
            ran.append(name)
            if fails:
                raise ForayError("no nvcc\nlong story")
            return {"rate": 1.23456}

        return Stage(name, run, ())

    monkeypatch.setattr(module, "STAGES", (stage("one"), stage("two", fails=True), stage("three")))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("FORAY_GPU_CHECK", "cpu")
    return ran


def test_a_second_call_continues_after_what_has_passed(
    stages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 1 and stages == ["one", "two", "three"]
    assert "2/3 two: failed" in capsys.readouterr().out
    assert main([]) == 1 and stages == ["one", "two", "three", "two"]
    assert "1/3 one: passed" in capsys.readouterr().out and main(["three"]) == 1 and stages[-1] == "three"
    assert main(["--fresh"]) == 1 and stages[-3:] == ["one", "two", "three"]
    kept = json.loads((tmp_path / ".cache" / "gpu-check-cpu.json").read_text())
    assert kept["stages"]["one"]["figures"] == {"rate": 1.235} and kept["machine"]["date"]
    assert "| two | failed | 0 | no nvcc |" in stage_table(kept)


def test_what_is_not_installed_is_skipped_and_said(tmp_path: Path) -> None:
    on = Machine("cpu", str(tmp_path / "python"), tmp_path)
    absent = run_stage(Stage("a", lambda on: {}, ("no_such_package",)), on, online=True)
    assert absent["result"] == "skipped" and "no_such_package" in absent["line"]
    engine = next(stage for stage in STAGES if stage.name == "engine")
    assert "NET=no" in run_stage(engine, on, online=False)["line"]
    assert str(tmp_path / "python") in run_stage(engine, on, online=True)["line"]


def test_stages_are_named_once_and_end_in_minutes() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names) == 10
    with pytest.raises(SystemExit):
        main(["nonsense"])
