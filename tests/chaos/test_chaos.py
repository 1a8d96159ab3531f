"""A short `make chaos`: scripted faults against real processes, and the control, which the checker must fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from driver import Result, fight
from schedule import Planned, make_schedule

SCRIPT = (
    # first Redis lasts, so that leases lapse and tasks are taken over
    Planned(0.3, "stop", "rollout-2", 7.0, 1),
    Planned(0.5, "cut reply", "rollout-1", 4.0, 3),
    Planned(0.8, "publish twice", "rollout-1", 0.0, 1),
    Planned(0.9, "corrupt group", "flipped", 4.0, 2),
    Planned(1.6, "kill", "learner", 0.0, 1),
    Planned(3.0, "kill", "engine-1", 0.0, 4),
    Planned(6.5, "takeover", "learner", 10.0, 1),
    Planned(7.6, "kill", "redis", 0.0, 1),
    Planned(8.6, "kill", "rollout-1", 0.0, 1),
    Planned(9.0, "partition", "engine-2", 2.0, 1),
    Planned(9.4, "stop", "redis", 2.0, 1),
    Planned(12.0, "flushall", "redis", 0.0, 1),
    Planned(14.4, "wipe redis", "redis", 0.0, 1),
    Planned(17.0, "second learner", "learner", 10.0, 1),
)
DRAWN = tuple(replace(item, at=item.at + 11.5) for item in make_schedule(2, 4.0, kinds=("kill", "term")))
"""And some by a seed."""
SECONDS = 18.0
PATIENCE_S = 60.0
"""Seconds for a target to come back on a busy machine."""


def fought(result: Result, lines: list[str]) -> str:
    return "\n".join([*lines, result.render()])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.fault(1, 3, 7, 13, 23, 24, 28, 29, 30, 32)
def test_nothing_is_lost_and_nothing_trained_twice_under_scripted_faults(warm_model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    faults = (*SCRIPT, *DRAWN)
    result = fight(
        *(tmp_path, warm_model, faults), seed=2, seconds=SECONDS, persistence=True, late_s=PATIENCE_S, say=lines.append
    )
    assert result.ok, fought(result, lines)
    assert result.verdict.twice == [] and result.verdict.missing == []
    assert result.left_out == 0 and set(result.witnessed) == {item.kind for item in faults}, fought(result, lines)
    assert result.verdict.epochs >= 3, "the learner was killed, and another one took over"
    taken = result.recoveries
    assert taken["tasks reclaimed"] + taken["leases lost"] > 0, fought(result, lines)
    assert taken["duplicate publications refused"] > 0 and taken["dead letters"] > 0, fought(result, lines)
    assert taken["fenced"] > 0 and taken["state made again"] > 0, fought(result, lines)
    print(fought(result, lines))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_delivery_rules_the_same_harness_sees_losses_and_doubles(warm_model: Path, tmp_path: Path) -> None:
    faults = [Planned(at, "kill", target, 0.0, 1) for at, target in ((2.0, "learner"), (4.0, "rollout-1"))]
    result = fight(
        tmp_path, warm_model, faults, seed=0, seconds=8.0, persistence=True, control=True, say=lambda _: None
    )
    assert result.verdict.twice and result.verdict.missing and not result.verdict.ok, result.render()
