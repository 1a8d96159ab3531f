"""A short `make chaos`: scripted faults against real processes, and the control, which the checker must fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import KINDS
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


STANDSTILLS = (
    Planned(0.5, "standstill", "retriever", 5.0, 1),
    Planned(0.6, "publish burst", "rollout-1", 10.0, 1),
    Planned(6.0, "blocked event loop", "rollout-2", 7.0, 1),
    Planned(7.0, "standstill", "learner", 5.0, 1),
    Planned(13.5, "standstill", "rollout-1", 7.0, 1),
    Planned(14.0, "standstill", "engine-1 node", 7.0, 1),
    Planned(22.0, "standstill", "redis", 5.0, 1),
    Planned(28.0, "publish burst", "rollout-2", 10.0, 1),
    Planned(30.0, "suspended machine", "machine", 6.0, 1),
    Planned(37.0, "standstill", "engine-2 engine", 8.0, 1),
)
HOST = (
    Planned(0.5, "no descriptors", "rollout-1", 4.0, 1),
    Planned(1.0, "kill in checkpoint", "learner", 14.0, 1),
    Planned(3.0, "no descriptors", "retriever", 4.0, 1),
    Planned(8.0, "second in resume", "learner", 40.0, 1),
    Planned(22.0, "no space", "run directory", 8.0, 2),
    Planned(31.0, "deadly batch", "learner", 75.0, 1),
)
CLOCKS = (
    Planned(0.5, "clock jumps", "rollout-2", 70.0, 1),
    Planned(1.0, "clock jumps", "redis", 70.0, 1),
)


def possible(faults: tuple[Planned, ...]) -> tuple[Planned, ...]:
    """Replace what this machine cannot do: a limit on the size of files for a small file system."""
    small = not KINDS["no space"].lacking()
    return tuple(
        item if small or item.kind != "no space" else replace(item, kind="disk full", target="learner")
        for item in faults
    )


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


def fight_all(faults: tuple[Planned, ...], warm_model: Path, folder: Path) -> Result:
    """Run a script; every fault must happen, and cost neither a group nor a healthy engine."""
    lines: list[str] = []
    result = fight(
        *(folder, warm_model, faults),
        **{"seed": 3, "seconds": faults[-1].at + 1, "persistence": True, "late_s": PATIENCE_S, "say": lines.append},
    )
    assert result.ok, fought(result, lines)
    assert result.left_out == 0 and result.witnessed == result.done, fought(result, lines)
    assert result.losses()["engines ejected though healthy"] == result.losses()["groups lost"] == 0
    assert set(result.whole_s) == {item.kind for item in faults}, fought(result, lines)
    print(fought(result, lines))
    return result


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.fault(3, 28, 53, 54, 55, 64)
def test_after_a_standstill_no_healthy_engine_is_ejected_and_no_group_is_lost(warm_model: Path, tmp_path: Path) -> None:
    result = fight_all(STANDSTILLS, warm_model, tmp_path)
    assert result.recoveries["tasks reclaimed"] + result.recoveries["leases lost"] > 0
    assert result.recoveries["lease taken again"] > 0 and result.recoveries["duplicate publications refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.fault(9, 13, 35, 57, 60, 61, 63)
def test_no_group_is_lost_without_descriptors_or_space_and_with_crashes_at_start(
    warm_model: Path, tmp_path: Path
) -> None:
    result = fight_all(possible(HOST), warm_model, tmp_path)
    assert result.recoveries["resumed from a checkpoint"] > 0 and result.recoveries["second learner refused"] > 0
    assert result.recoveries["batch set aside"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.fault(45, 56)
def test_wall_clocks_that_jump_cost_no_group(warm_model: Path, tmp_path: Path) -> None:
    if lacking := KINDS["clock jumps"].lacking():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lacking)
    fight_all(CLOCKS, warm_model, tmp_path)
