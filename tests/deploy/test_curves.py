"""Curves of runs side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy.run.history import read_history, read_steps
from foray.cli import main
from foray.commands.watch.curves import running_means, windows
from foray.dashboard.files import StepFile


def write_run(directory: Path, values: list[float], *, epoch: int = 1, first: int = 1, mode: str = "w") -> Path:
    directory.mkdir(exist_ok=True)
    with (directory / "metrics.jsonl").open(mode) as file:
        for step, value in enumerate(values, start=first):
            file.write(json.dumps({"step": step, "epoch": epoch, "reward/em": value, "note": "x"}) + "\n")
    return directory


def curves(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, float]]:
    assert main(["curves", "--json", *args]) == 0
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)["curves"]
    return found


def test_windows_are_means_and_the_last_one_has_the_steps_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", [0.0, 1.0, 0.5, 0.5, 9.0])
    assert curves(capsys, str(run), "--every", "2") == {str(run): {"2": 0.5, "4": 0.5, "5": 9.0}}


@pytest.mark.parametrize("steps", [3, 15])
def test_every_step_of_a_short_run_is_shown(steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [0.25] * steps)
    assert main(["curves", str(run)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["step", "reward/em"]
    assert [row[0] for row in rows[2:]] == [str(step) for step in range(1, steps + 1)]


def test_without_a_metric_an_overview_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = ("response_length_mean", "turns_mean", "searches_mean")
    fields = ("reward_mean", "reward/em", *means, "entropy", "kl_behaviour", "lag_mean")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": s, **dict.fromkeys(fields, s / 10), "x": 1}) for s in range(1, 36)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    assert main(["curves", str(tmp_path / "a")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["step", *fields] and [row[0] for row in rows[2:]] == ["10", "20", "30", "35"]
    assert rows[-1] == ["35", *["3.300"] * len(fields)]
    assert main(["curves", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}, means of 10 steps" in out for name in fields)


def test_a_run_of_an_earlier_version_is_read_under_the_present_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, path = {"em_mean": 0.5, "length_mean": 20.0}, tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "epoch": 1, **old}) + "\n")
    with path.open("a") as file:  # and resumed by this one
        file.write(json.dumps({"step": 2, "epoch": 1, "reward/em": 0.75, "response_length_mean": 30.0}) + "\n")
    whole = {str(tmp_path): {"1": 0.5, "2": 0.75}}
    assert curves(capsys, str(tmp_path)) == whole
    assert curves(capsys, str(tmp_path), "--metric", "em_mean") == whole
    assert curves(capsys, str(tmp_path), "--metric", "length_mean") == {str(tmp_path): {"1": 20.0, "2": 30.0}}
    history = read_history(path)
    assert history.mean("reward/em") == 0.625 and history.mean("response_length_mean") == 25.0


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(write_run(tmp_path / "a", []))]) == 0
    assert "no step has been trained yet" in capsys.readouterr().out


def test_of_a_step_trained_twice_the_surviving_epoch_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [0.0, 0.0])
    write_run(run, [1.0], epoch=2, first=2, mode="a")
    assert curves(capsys, str(run), "--every", "1") == {str(run): {"1": 0.0, "2": 1.0}}


def test_steps_that_were_rolled_back_are_gone_everywhere_and_half_a_line_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", [0.1] * 20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew\n')  # a killed learner
    write_run(run, [0.5, 0.6], epoch=2, first=11, mode="a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    assert list(curves(capsys, str(run), "--every", "1")[str(run)].items())[-2:] == [("11", 0.5), ("12", 0.6)]
    found = read_history(run / "metrics.jsonl")
    assert found.last["step"] == 12 and [r["step"] for r in found.recent] == [11, 12]
    pages = StepFile(run / "metrics.jsonl")
    pages.update()
    assert list(read_steps(run / "metrics.jsonl")) == pages.curves(["reward/em"])["step"] == list(range(1, 13))


def test_two_runs_are_compared_at_equal_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [0.1, 0.2, 0.3]), write_run(tmp_path / "b", [0.1, 0.6])
    assert main(["curves", str(a), str(b), "--every", "1"]) == 0
    assert "largest difference 0.400 at step 2; at the last step 2: 0.400" in capsys.readouterr().out


def test_a_misspelt_metric_is_answered_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [0.1])
    assert main(["curves", str(run), "--metric", "em"]) == 2
    assert "choose one of epoch, reward/em, step" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "gone")]) == 2


def test_runs_are_called_by_their_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [0.5]), write_run(tmp_path / "b", [0.25])
    assert curves(capsys, str(a), str(b), "--every", "1", "--labels", "grpo, ppo") == {
        "grpo": {"1": 0.5},
        "ppo": {"1": 0.25},
    }
    assert main(["curves", str(a), str(b), "--labels", "grpo"]) == 2
    assert "1 labels for 2 runs" in capsys.readouterr().err
    assert main(["curves", str(a), str(a)]) == 2


def test_a_plot_has_every_run_and_is_the_same_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / f"r{i}", [(step * (i + 1)) % 97 / 97 for step in range(200)]) for i in range(8)]
    labels = [f"algorithm {i}" for i in range(8)]
    for name in ("one.svg", "two.svg"):
        argv = ["curves", *map(str, runs), "--labels", ",".join(labels), "--plot", str(tmp_path / name)]
        assert main([*argv, "--baseline", "target=0.8"]) == 0
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "two.svg").read_text()
    assert all(f">{label}<" in picture for label in [*labels, "target", "reward/em, mean of 10 steps"])
    assert len(picture) < 60_000, "a page of the repository has to carry it"
    drawn = ElementTree.fromstring(picture)
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"


def test_plotted_means_are_those_of_the_table_where_both_have_one() -> None:
    curve = {step: float(step % 7) for step in range(1, 48) if step != 13}
    smooth = running_means(curve, 10)
    assert min(smooth) == 10 and max(smooth) == 47
    assert {step: smooth[step] for step in (10, 20, 30, 40)} == {s: m for s, m in windows(curve, 10).items() if s < 47}


def test_what_cannot_be_plotted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(write_run(tmp_path / "a", [0.1]))
    assert main(["curves", run, "--plot", str(tmp_path / "a.gif")]) == 2
    assert "use the suffix .svg or .png" in capsys.readouterr().err
    assert main(["curves", run, "--plot", str(tmp_path / "a.svg"), "--baseline", "0.8"]) == 0
    assert main(["curves", run, "--plot", str(tmp_path / "a.svg"), "--baseline", "high"]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert main(["curves", run, "--plot", str(tmp_path / "a.svg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_plot_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(write_run(tmp_path / "a", [])), "--plot", str(tmp_path / "a.svg")]) == 2
    assert "nothing to plot" in capsys.readouterr().err and not (tmp_path / "a.svg").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/f1": 0.5}\n')
    assert main(["curves", str(tmp_path), "--plot", str(tmp_path / "a.svg")]) == 2
    assert "give --metric one of reward/f1, step" in capsys.readouterr().err


def test_several_metrics_are_all_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "loss": 0.25, "entropy": 2.0}\n')
    given = ["curves", str(run), "--metric", "loss", "--metric", "entropy"]
    assert main([*given, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["metrics"]) == {"loss", "entropy"}
    assert main([*given, "--plot", str(tmp_path / "x.svg")]) == 2
    assert "--plot draws one metric" in capsys.readouterr().err
