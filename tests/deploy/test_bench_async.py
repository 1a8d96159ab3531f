"""`foray bench async`: its arithmetic on a simulated ring, saved results, and a ring without lag, which must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import asynchrony as async_ring
from benchmarks.asynchrony import AsyncBench, CpuSamples, MeasuredSteps, figures, kept, play, summary
from benchmarks.base import tree_cpu_seconds
from benchmarks.report import judged
from foray.cli import main
from learner.observability.metric_table import STEP
from protocol.errors import ForayError

TOKENS = 1000.0


def simulated(generate_s: float, train_s: float, lag: int, steps: int = 40) -> list[dict[str, Any]]:
    """The learner's records of an ideal ring: a batch may begin once the step `lag` + 1 before its own is done, and
    generation and training each do one batch at a time."""
    generated, trained = [0.0], [0.0]
    records = []
    for step in range(1, steps + 1):
        generated.append(max(generated[-1], trained[max(step - 1 - lag, 0)]) + generate_s)
        wait = max(generated[step] - trained[-1], 0.0)
        trained.append(trained[-1] + wait + train_s)
        records.append(
            {"step": step, "time_s": 100 + trained[-1], "seconds": {"wait": wait}, "tokens_trained": TOKENS}
            | {"reward/em": step / steps, "lag_mean": float(lag), "lag_max": float(lag), "tokens_stale": 1.0}
        )
    return records


def row(lag: int, *, ring_lag: int | None = None, generate_s: float = 3.0, train_s: float = 2.0) -> dict[str, Any]:
    """Records of a ring that is configured with `lag` and runs at `ring_lag`."""
    records = simulated(generate_s, train_s, lag if ring_lag is None else ring_lag)
    samples = CpuSamples({record["step"]: 4.0 * record["step"] for record in records})
    return {"seed": 0, "max_lag": lag, "groups_discarded": 2, **figures(records, MeasuredSteps(5, 35), samples)}


def of_bound(rows: list[dict[str, Any]]) -> tuple[float, bool]:
    measured = summary(rows)
    (target,) = AsyncBench.targets
    verdict = judged(target, {"ratio": measured.ratio, **measured.details})
    return measured.details["of_bound"], verdict["met"]


def test_figures_are_of_the_window_alone() -> None:
    found = row(0)
    assert found["tokens_per_s"] == pytest.approx(TOKENS / 5) and found["tokens_per_cpu_s"] == pytest.approx(TOKENS / 4)
    assert found["cores_used"] == pytest.approx(4 / 5), "4 s of processor time in steps of 5 s"
    assert (found["wait_s"], found["train_s"], found["step_s"]) == pytest.approx((3.0, 2.0, 5.0))
    assert found["tokens_stale"] == 30 and found["em_last"] == pytest.approx(sum(range(31, 41)) / 400)


def test_a_run_without_a_vote_at_its_end_has_no_exact_match() -> None:
    records = simulated(3.0, 2.0, 0)
    samples = CpuSamples({record["step"]: 1.0 * record["step"] for record in records})
    for record in records[-10:]:
        del record["reward/em"]
    assert figures(records, MeasuredSteps(5, 35), samples)["em_last"] is None


def test_the_records_that_are_read_are_those_that_a_learner_writes() -> None:
    written = {*STEP, "time_s", "seconds", "reward/em"}
    assert set(simulated(1.0, 1.0, 0)[0]) <= written, "the names of metrics.jsonl have changed"


@pytest.mark.parametrize(("generate_s", "train_s"), [(3.0, 2.0), (1.0, 4.0), (2.0, 2.0)])
def test_a_ring_that_overlaps_reaches_the_bound(generate_s: float, train_s: float) -> None:
    rows = [row(lag, generate_s=generate_s, train_s=train_s) for lag in (0, 1, 4)]
    measured = summary(rows)
    bound = (generate_s + train_s) / max(generate_s, train_s)
    assert measured.details["bound"] == pytest.approx(bound) and measured.ratio == pytest.approx(bound)
    assert of_bound(rows) == (pytest.approx(1.0), True)


def test_a_ring_that_never_overlaps_misses_the_target() -> None:
    value, met = of_bound([row(0), row(1, ring_lag=0)])
    assert value == pytest.approx(0.6) and not met


def test_the_ratio_is_of_lag_one_whatever_larger_lags_reach() -> None:
    measured = summary([row(0), row(4), row(1, ring_lag=0)])
    assert measured.ratio == pytest.approx(1.0) and [r["max_lag"] for r in measured.details["by_lag"]] == [0, 1, 4]


def test_a_run_is_measured_once_and_again_when_anything_changed(tmp_path: Path) -> None:
    ran: list[int] = []

    def run() -> dict[str, Any]:
        ran.append(1)
        return {"runs": len(ran)}

    path = tmp_path / "row.json"
    assert [kept(path, key, run)["runs"] for key in (["a"], ["a"], ["b"], ["b"], ["a"])] == [1, 1, 2, 2, 3]


def test_processor_time_is_of_everything_below_a_process_whatever_session_it_leads() -> None:
    busy = "import time; s = time.process_time()\nwhile time.process_time() < s + 0.3: pass\nprint(flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}], start_new_session=True)"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert tree_cpu_seconds(child.pid) >= 0.29 and tree_cpu_seconds(os.getpid()) >= tree_cpu_seconds(child.pid)
        child.stdin.write("\n")


def test_a_window_needs_two_looks() -> None:
    samples = CpuSamples()
    samples.look(3, [])
    with pytest.raises(ForayError, match="only 1 steps"):
        samples.between(MeasuredSteps(2, 9))


@pytest.mark.parametrize("argv", [["--lags", "1,2"], ["--lags", "0,0"], ["--steps", "11"], ["--lags", "0,33"]])
def test_settings_that_measure_nothing_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "async", *argv]) == 2
    assert "async" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_ring_that_is_forced_to_lag_0_misses_the_target(
    tmp_path: Path, warm_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = AsyncBench._overrides
    monkeypatch.setattr(AsyncBench, "_overrides", lambda self, lag: honest(self, 0))
    played: list[dict[str, Any]] = []

    def once(*args: Any, **settings: Any) -> dict[str, Any]:
        """Both lags mean the same ring here, so one run stands for both: two would differ by the machine's noise."""
        if not played:
            played.append(play(*args, **settings))
        return played[0]

    monkeypatch.setattr(async_ring, "play", once)
    argv = ["--lags", "0,1", "--seeds", "0", "--steps", "8", "--skip", "2", "--groups-per-step", "4"]
    assert main(["bench", "async", "--json", *argv, "--model", str(warm_model), "--dir", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    (target,) = result["targets"]
    assert result["ratio"] == 1.0 and result["of_bound"] == pytest.approx(1 / result["bound"], abs=1e-3)
    assert target["met"] is False, "waiting and training take turns, each a tenth of a step or more"
    assert [r["lag_max"] for r in result["by_lag"]] == [0, 0], "the ring never trained on anything older"
    assert all(r["tokens_per_cpu_s"] > 0 and r["train_s"] > 0 and r["wait_s"] > 0 for r in result["by_lag"])
