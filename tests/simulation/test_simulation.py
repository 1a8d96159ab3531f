"""Hundreds of schedules in virtual time, the product whole, every law asked at every move."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
from sim.install import installed
from sim.knobs import KINDS
from sim.world import Result, play

SECONDS = float(os.environ.get("FORAY_SIMULATION_S", "8"))


def failure(result: Result) -> str:
    """What a failed schedule says, and how to see it again."""
    log = "\n".join(play(result.seed, aloud=True).lines)
    again = f"again: python tests/simulation/run.py --only --seed {result.seed}"
    return f"seed {result.seed}: {result.problem}\n{log}\n{again}"


@pytest.mark.fault(1, 3, 7, 8, 9, 11, 13, 14, 23, 24, 25, 27, 28, 29, 30, 32, 33, 39, 41, 44, 45)
def test_every_law_holds_in_every_schedule() -> None:
    faults, checks, schedules = Counter[str](), Counter[str](), 0
    until = time.perf_counter() + SECONDS
    with installed():
        while time.perf_counter() < until:
            result = play(schedules)
            assert not result.problem, failure(result)
            faults, checks, schedules = faults + result.faults, checks + result.checks, schedules + 1
    assert schedules >= 40, "so few schedules show nothing"
    assert not [kind for kind in KINDS if not faults[kind]], "a fault that never happened was not tested"
    assert min(checks.values()) > 0 and len(checks) >= 9


def test_a_seed_is_the_same_schedule_again() -> None:
    with installed():
        once, again = play(7, aloud=True), play(7, aloud=True)
    assert once.lines == again.lines and once.moves == again.moves
