"""`foray bench dashboard`: its arithmetic, and windows of a real ring with the page open and closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dashboard import DashboardBench, summary


def test_costs_are_per_trained_token_and_of_each_kind_of_window() -> None:
    closed = {"open": False, "tokens": 1000, "learner": 3.0, "rollout": 1.0, "dashboard": 0.0}
    shown = {"open": True, "tokens": 2000, "learner": 7.0, "rollout": 3.0, "dashboard": 1.0}
    found = summary([closed, shown, closed])
    assert (found.value, found.baseline["value"], found.ratio) == (5.0, 4.0, 0.8)
    assert found.details["learner_open"] == 3.5 and found.details["rollout_closed"] == 1.0
    assert found.details["dashboard_open"] == 0.5


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_ring_is_measured_with_the_page_open_and_closed(warm_model: Path) -> None:
    said: list[str] = []
    bench = DashboardBench.model_validate({**DashboardBench.quick, "model": warm_model})
    found = bench.measure(said.append)
    assert [row["open"] for row in found.details["windows"]] == [False, True]
    assert all(row["tokens"] > 0 and row["learner"] > 0 for row in found.details["windows"])
    assert found.details["dashboard_open"] > 0 and found.value > 0, "someone read the pages"
