"""The short form of `make chaos`: scripted faults against real processes, and the control that shows that it sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import Result, fight
from schedule import Planned

SCRIPT = (
    Planned(0.3, "cut reply", "rollout-1", 4.0, 3),
    Planned(0.5, "publish twice", "rollout-2", 0.0, 1),
    Planned(0.8, "corrupt group", "flipped", 4.0, 2),
    Planned(1.6, "kill", "learner", 0.0, 1),
    Planned(2.4, "stop", "rollout-2", 6.0, 1),
    Planned(3.2, "kill", "redis", 0.0, 1),
    Planned(4.6, "kill", "engine-1", 0.0, 4),
    Planned(5.4, "flushall", "redis", 0.0, 1),
    Planned(6.2, "takeover", "learner", 10.0, 1),
    Planned(8.6, "kill", "rollout-1", 0.0, 1),
    Planned(9.0, "partition", "engine-2", 2.0, 1),
    Planned(9.4, "stop", "redis", 2.0, 1),
    Planned(12.0, "wipe redis", "redis", 0.0, 1),
    Planned(14.0, "second learner", "learner", 10.0, 1),
)
SECONDS = 15.0


def fought(result: Result, told: list[str]) -> str:
    return "\n".join([*told, result.render()])


@pytest.mark.ring
@pytest.mark.timeout(400)
@pytest.mark.fault(1, 3, 7, 13, 17, 23, 24, 28, 29, 30, 32)
def test_nothing_is_lost_and_nothing_trained_twice_under_scripted_faults(warm_model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    result = fight(tmp_path, warm_model, SCRIPT, seed=0, seconds=SECONDS, persistence=True, say=told.append)
    assert result.ok, fought(result, told)
    assert result.verdict.twice == [] and result.verdict.missing == []
    assert result.left_out == 0 and set(result.witnessed) == {item.kind for item in SCRIPT}, fought(result, told)
    assert result.verdict.epochs >= 3, "the learner was killed, and another one took over"
    print(fought(result, told))


@pytest.mark.ring
@pytest.mark.timeout(300)
def test_without_the_delivery_rules_the_same_harness_sees_losses_and_doubles(warm_model: Path, tmp_path: Path) -> None:
    faults = [Planned(at, "kill", target, 0.0, 1) for at, target in ((2.0, "learner"), (4.0, "rollout-1"))]
    result = fight(
        tmp_path, warm_model, faults, seed=0, seconds=8.0, persistence=True, control=True, say=lambda _: None
    )
    assert result.verdict.twice and result.verdict.missing and not result.verdict.ok, result.render()
