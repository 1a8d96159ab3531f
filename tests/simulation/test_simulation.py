"""Hundreds of schedules in virtual time with the whole product; every invariant is checked at every move.

The same schedules find every mutation of the product, so a result without findings is meaningful.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from sim.install import installed
from sim.knobs import KINDS
from sim.mutations import MUTATIONS
from sim.world import Result, play

SCHEDULES = 110
QUICK = 25
MUTANT_SCHEDULES = 60
INVARIANTS = 10


def failure(result: Result) -> str:
    """Return the problem of a failed schedule, and the command that repeats it."""
    log = "\n".join(play(result.seed, aloud=True).lines)
    again = f"again: python tests/simulation/run.py --only --seed {result.seed}"
    return f"seed {result.seed}: {result.problem}\n{log}\n{again}"


def play_all(schedules: int) -> Result:
    """Run all schedules and return the totals; fail at the first broken invariant."""
    faults, checks, endings = Counter[str](), Counter[str](), Counter[str]()
    with installed():
        for seed in range(schedules):
            result = play(seed)
            assert not result.problem, failure(result)
            faults, checks, endings = faults + result.faults, checks + result.checks, endings + result.endings
    assert endings["done"] >= schedules and endings["fenced"] and endings["killed"]
    assert len(checks) >= INVARIANTS, "an invariant that was never checked was not tested"
    return replace(result, faults=faults, checks=checks, endings=endings)


@pytest.mark.slow
def test_every_invariant_holds_in_the_first_schedules() -> None:
    seen = play_all(QUICK)
    assert len(seen.faults) > len(KINDS) / 2 and seen.faults["refused at the limit"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.fault(1, 3, 7, 8, 9, 10, 11, 13, 14, 23, 24, 25, 27, 28, 29, 30, 32, 33, 41, 44, 45)
def test_every_invariant_holds_in_every_schedule() -> None:
    seen = play_all(SCHEDULES)
    assert seen.endings["refused"]
    assert not [kind for kind in KINDS if not seen.faults[kind]], "a fault that never happened was not tested"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_product_that_is_broken_on_purpose_is_found_out(name: str) -> None:
    mutation = MUTATIONS[name]
    with installed(mutation.replaced()):
        for seed in range(MUTANT_SCHEDULES):
            result = play(seed, mutation.knobs(seed))
            if result.problem:
                break
    assert result.problem, f"{MUTANT_SCHEDULES} schedules show nothing of it"
    assert any(word in result.problem for word in mutation.invariants), f"found by another invariant: {result.problem}"


def test_a_seed_is_the_same_schedule_again() -> None:
    with installed():
        once, again = play(7), play(7)
    assert once.lines == again.lines and once.moves == again.moves and len(once.lines) > 3
