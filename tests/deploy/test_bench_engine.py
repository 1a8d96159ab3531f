"""`foray bench engine`: a small run of all three engines, and errors when one of them fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import Baseline
from foray.cli import main
from protocol.errors import ForayError


@pytest.mark.slow
def test_a_small_run_has_all_figures_of_the_engine_and_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["value"] == report["streaming"]["tokens_per_s"] > 0 and report["whole"]["tokens_per_s"] > 0
    assert report["ratio"] == pytest.approx(report["value"] / report["baseline"]["tokens_per_s"], rel=1e-2)
    assert report["baseline"]["cpu_ms_per_token"] > 0


@pytest.mark.slow
def test_a_baseline_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ForayError, match="transformers failed"),
        Baseline(tmp_path, tmp_path / "none", 1, "float32") as baseline,
    ):
        baseline.round([[20, 21]], 2)
