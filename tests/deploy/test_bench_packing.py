"""`foray bench packing`: the target is met, and the report has the figures of padding."""

from __future__ import annotations

import json

import pytest

from benchmarks.packing import PackingBench, padded_share, shares
from foray.cli import main


def test_skewed_trajectories_fill_nineteen_of_twenty_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "packing", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (target,) = report["targets"]
    assert report["worst"] >= target["at_least"] == 0.95 and target["met"]
    assert report["ratio"] == pytest.approx(report["value"] / report["baseline"]["share"], rel=1e-2)
    assert (
        report["padded_whole"]
        < report["padded"]
        < report["baseline"]["share"]
        == report["padded_sorted"]
        < report["value"]
    )
    assert report["trained_share"] < 0.5 and report["longest_over_mean"] > 2, "the batch is not what it is said to be"


def test_shares_are_of_the_same_tokens() -> None:
    assert padded_share([2, 4, 1, 1], 2) == 8 / 10
    assert padded_share([1, 1, 2, 4], 4) == 8 / 16
    alone = shares(PackingBench(groups=2, group_size=4, row_tokens=1, micro_batch_tokens=1), 0)
    assert alone["packed"] == 1.0, "a micro-batch for each row pads nothing"
