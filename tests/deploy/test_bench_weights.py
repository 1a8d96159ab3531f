"""`foray bench weights`: a small run of everything, and that it measures what it says."""

from __future__ import annotations

import json

import pytest

from foray.cli import main


@pytest.mark.slow
def test_a_small_run_reports_both_transports_beside_both_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--quick", "--megabytes", "2", "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["name"], report["unit"]) == ("weights", "bytes/s")
    (row,) = report["by_engines"]
    assert row["engines"] == 1 and row["bytes"] >= 2_000_000
    assert report["value"] == pytest.approx(row["bytes"] / row["distributed_seconds"], rel=1e-3)
    assert report["ratio"] == pytest.approx(report["value"] / report["baseline"]["bytes_per_s"], rel=1e-3)
    assert report["baseline"]["bytes_per_s"] == pytest.approx(row["bytes"] / row["raw_broadcast_s"], rel=1e-3)
    assert report["baseline"]["checked_ratio"] == pytest.approx(
        row["checked_broadcast_s"] / row["distributed_seconds"], rel=1e-3
    )
    for kind in ("distributed", "disk"):
        assert 0 < row[f"{kind}_pause_s"] < row[f"{kind}_seconds"]
        assert row[f"{kind}_announced_s"] < row[f"{kind}_seconds"]
    assert row["distributed_transfer_s"] > 0 and row["distributed_verify_s"] > 0
