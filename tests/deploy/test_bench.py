"""`foray bench` in a script: one JSON object, validated settings, a baseline with every figure."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

import benchmarks as table
from benchmarks import BENCHMARKS
from benchmarks.base import BenchResult, BenchSettings, Say
from benchmarks.command import rounded
from foray.cli import main
from protocol.runtime.config import descriptions


class Sheep(BenchSettings):
    """Counts them."""

    help: ClassVar[str] = "sheep a second"
    quick: ClassVar[dict[str, Any]] = {"count": 2}

    count: int = Field(default=7, ge=1)
    """How many."""

    def measure(self, say: Say) -> BenchResult:
        say("counting")
        rows = [{"sheep": i, "seconds": 1 / 3} for i in range(self.count)]
        return BenchResult(self.count / 3, "sheep/s", {"name": "goats", "value": 1.0}, self.count / 3, {"rows": rows})


@pytest.fixture(autouse=True)
def sheep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.BENCHMARKS, "sheep", Sheep)


def test_json_is_one_object_with_the_figure_its_baseline_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sheep", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["name"], report["value"], report["unit"], report["ratio"]) == ("sheep", 2.333, "sheep/s", 2.333)
    assert report["baseline"] == {"name": "goats", "value": 1.0} and report["settings"] == {"count": 7}
    assert report["machine"]["cores"] >= 1 and {"load_1m", "load_1m_end", "run_s"} <= report["machine"].keys()
    assert err == "[sheep] counting\n", "progress is not part of the answer"


def test_what_a_library_prints_is_no_part_of_the_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed logs to stdout while it is imported; a C library or a child process writes to descriptor 1."""
    quiet = Sheep.measure

    def noisy(self: Sheep, say: Say) -> BenchResult:
        print("[WARNING] from Python")
        os.write(1, b"from descriptor 1\n")
        subprocess.run(["echo", "from a child"], check=True)
        return quiet(self, say)

    monkeypatch.setattr(Sheep, "measure", noisy)
    assert main(["bench", "sheep", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["name"] == "sheep"
    assert {"[WARNING] from Python", "from descriptor 1", "from a child"} <= set(err.splitlines())


def test_a_quick_run_is_small_and_a_flag_has_the_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sheep", "--json", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"count": 2}
    assert main(["bench", "sheep", "--json", "--quick", "--count", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"count": 3}


def test_without_json_it_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sheep", "--count", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ratio", "0.6667"] in lines and ["sheep", "seconds"] in lines and ["1", "0.3333"] in lines


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sheep", "--count", "0"], "sheep.count = '0'"),
        (["sheep", "--trajectories", "8"], "unrecognized arguments: --trajectories"),
        (["rollout", "--trajectories", "9"], "trajectories = 9 is not a multiple of group_size = 8"),
        (["rollout", "--seeds", "0,x"], "rollout.seeds.1 = 'x'"),
    ],
)
def test_a_wrong_setting_answers_at_once(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_what_it_does_and_has_a_small_run(name: str) -> None:
    kind = BENCHMARKS[name]
    assert kind.help and kind.model_validate(kind.quick) != kind()
    assert all(descriptions(kind).get(name) for name in kind.model_fields)


@pytest.mark.parametrize("argv", [["bench", "rollout", "--json"], ["demo-lm", "--help"]])
def test_outside_a_checkout_it_says_what_it_needs(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel has the commands' names and not their code."""
    monkeypatch.setattr("foray.cli.ROOT", tmp_path)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "needs a checkout" in err and "make setup" in err


def test_figures_have_four_digits() -> None:
    assert rounded({"a": [1.23456, {"b": 0.000123456}], "n": 123456}) == {"a": [1.235, {"b": 0.0001235}], "n": 123456}
