"""`foray bench transport`: Redis refuses, every seq arrives once, and the baseline moved the same bytes."""

from __future__ import annotations

import json

import pytest

from foray.cli import main


@pytest.mark.fault(25, 48)
@pytest.mark.slow
def test_clients_push_until_redis_refuses_and_no_group_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transport", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    chain, load = report["chain"], report["load"]
    assert report["ratio"] == pytest.approx(report["value"] / report["baseline"]["groups_per_s"], rel=1e-2)
    assert chain["bytes_per_group"] == report["baseline"]["bytes_per_group"] > 8 * 256 * 4
    unchecked = report["unchecked"]
    assert report["unchecked_ratio"] == pytest.approx(report["value"] / unchecked["groups_per_s"], rel=1e-2)
    assert unchecked.keys() == chain.keys() and all(value > 0 for value in unchecked.values())
    assert load["until_back_pressure"]["refused_writes"] > 0, "the witness: Redis said OOM"
    assert (load["lost"], load["twice"]) == (0, 0)
    assert sum(c["published"] for c in load["clients"]) == load["groups"] > load["until_back_pressure"]["groups"]
    assert load["held"]["redis_peak_mib"] <= 1.2 * load["until_back_pressure"]["maxmemory_mib"]
    assert all(c["waited_for_redis_s"] > 0 and c["loop_lag_p99_s"] > 0 for c in load["clients"])
