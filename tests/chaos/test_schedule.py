"""The seed determines all faults, and a long enough run has all kinds of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from attacks import KINDS
from recoveries import COUNTERS, LEARNER_COUNTERS, LETTERS, LOGS
from schedule import make_schedule


def test_a_seed_makes_the_same_schedule_again_and_another_seed_another_one() -> None:
    assert make_schedule(7, 120) == make_schedule(7, 120)
    assert make_schedule(7, 120) != make_schedule(8, 120)
    assert make_schedule(7, 600)[:40] == make_schedule(7, 300)[:40], "a longer run begins as a shorter one"


def test_a_minute_has_every_kind_and_a_kill_of_every_process() -> None:
    planned = make_schedule(3, 100)
    assert {item.kind for item in planned} == set(KINDS)
    assert {item.target for item in planned if item.kind == "kill"} == set(KINDS["kill"].targets)
    alone = [item.seconds if KINDS[item.kind].exclusive else 0.0 for item in planned]
    gaps = [later.at - item.at - pause for pause, (item, later) in zip(alone, pairwise(planned), strict=False)]
    assert max(gaps) < 3.0 and min(gaps) > 0.5


def test_kinds_are_drawn_by_their_weights() -> None:
    counts = Counter(item.kind for item in make_schedule(1, 6000))
    assert counts["kill"] > counts["stop"] > counts["takeover"] > 0


def test_twenty_minutes_have_a_standstill_of_every_process_for_every_duration() -> None:
    kind = KINDS["standstill"]
    found = {(i.target, i.seconds) for i in make_schedule(31, 1200) if i.kind == kind.name}
    assert found == {(target, seconds) for target in kind.targets for seconds in kind.lengths}


def test_every_path_that_a_fault_must_take_is_one_that_is_counted() -> None:
    counted = {*LOGS, *COUNTERS.values(), *LEARNER_COUNTERS.values(), *LETTERS.values(), "restarted"}
    assert {path for kind in KINDS.values() for path in kind.recovery} <= counted
