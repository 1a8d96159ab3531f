"""The choice of an engine, over tables; and the window of requests at one."""

from __future__ import annotations

import pytest

from protocol.messages import EngineInfo, NodeState
from rollout_server.engine.admission import PERIOD_S, UNKNOWN_CAPACITY, AimdLimit, InflightTracker
from rollout_server.engine.selection import Candidate, Work, pick_engine, tokens_of_others


def at(name: str, pace: float = 1.0, load: float = 0.0, busy: int = 0, failures: int = 0) -> Candidate:
    return Candidate(name, load, busy, failures, pace)


@pytest.mark.parametrize(
    ("engines", "usual", "expected"),
    [
        ([at("a"), at("b")], [], "a"),
        ([at("a", 1.2), at("b", 1.1)], [], "b"),
        ([at("a", load=9), at("b", load=1)], [], "b"),
        ([at("a", busy=3), at("b", busy=1)], [], "b"),
        # 50 tokens of an answer, and 320 of the prompt for ten more where they are not cached
        ([at("a", 1.0), at("b", 1.2)], ["b", ""], "b"),
        ([at("a", 1.0), at("b", 1.21)], ["b", ""], "a"),
        ([at("a"), at("b", 1.19)], ["", "b"], "b"),
        ([at("a"), at("b", 1.1), at("c", 1.1)], ["b", "c"], "b"),
        ([at("a"), at("b", 1.1)], ["gone", "b"], "a"),
        ([at("a", 9), at("b", failures=1)], [], "a"),
        ([at("a", 9), at("b", failures=1)], ["b", "b"], "a"),
        ([at("a", failures=2), at("b", 5, failures=1)], ["a", ""], "b"),
    ],
)
def test_which_engine_gets_a_turn(engines: list[Candidate], usual: list[str], expected: str) -> None:
    assert pick_engine(engines, usual, Work(prompt=320, answer=50)) == expected


def test_the_pace_of_an_engine_is_its_learnt_speed_at_its_load_and_the_others_is_assumed_until_then() -> None:
    inflight = InflightTracker(adaptive=True, clock=lambda: 0.0)
    slow, fast, new = (engine(id=name, max_running=10) for name in "abc")
    for one in (slow, fast):
        inflight.add(one, 100)
    assert inflight.pace(slow) == pytest.approx(1.2) and inflight.pace(new) == pytest.approx(1.1)
    inflight.learn(slow, 50, 50 * 0.11)
    inflight.learn(fast, 10, 10 * 0.022)
    assert inflight.pace(slow) == pytest.approx(0.12) and inflight.pace(fast) == pytest.approx(0.024)
    inflight.update([slow, fast, new])
    assert inflight.pace(new) == pytest.approx(0.06 * 1.1)
    inflight.learn(slow, 50, 50 * 0.11 * 17)
    assert inflight.pace(slow) == pytest.approx(0.24), "a sixteenth of what is new"
    inflight.update([engine(id="a", max_running=10, running=4, waiting=2)])
    assert inflight.pace(slow) == pytest.approx(0.2 * 1.7), "five requests of other servers"
    inflight.learn_length(160)
    assert inflight.turn_tokens == 64 + 6


@pytest.mark.parametrize(
    ("facts", "ours", "expected"),
    [
        ({}, 0, 0),
        ({"running": 4}, 4, 0),
        ({"running": 4}, 6, 0),
        ({"running": 4, "waiting": 2}, 4, 2 * 100),
        ({"running": 10, "token_usage": 0.5, "max_tokens": 8000}, 4, 6 * 400),
        ({"running": 10, "waiting": 5, "token_usage": 0.5, "max_tokens": 8000}, 0, 15 * 400),
        ({"running": 0, "waiting": 3, "token_usage": 0.0, "max_tokens": 8000}, 0, 3 * 100),
    ],
)
def test_what_other_servers_seem_to_have_at_an_engine(facts: dict, ours: int, expected: float) -> None:
    assert tokens_of_others(engine(**facts), ours, 100) == expected


def engine(**facts) -> EngineInfo:
    return EngineInfo(**({"id": "e", "url": "", "state": NodeState.READY, "incarnation": "i"} | facts))


def test_several_servers_see_each_other_by_what_the_engine_reports() -> None:
    inflight = InflightTracker(adaptive=True, clock=lambda: 0.0)
    loaded, idle = engine(id="a", running=30, max_tokens=10_000, token_usage=0.9), engine(id="b")
    inflight.add(loaded, 300)
    inflight.update([loaded, idle])
    assert inflight.load(loaded) == 300 + 29 * 300 and inflight.load(idle) == 0
    assert (inflight.requests(loaded), inflight.tokens(loaded), inflight.in_flight) == (1, 300, 1)
    inflight.remove(loaded, 300)
    inflight.update([idle])
    assert inflight.in_flight == 0 and inflight.load(loaded) == 0, "an incarnation that is gone is forgotten"
    inflight.update([engine(id="a", running=3)])
    assert inflight.load(loaded) == 3, "of unknown length"


def test_the_state_of_an_incarnation_lasts_while_it_is_present_or_has_requests() -> None:
    now = [0.0]
    inflight = InflightTracker(adaptive=True, clock=lambda: now[0])
    here, gone = engine(id="a", max_running=64), engine(id="b")
    inflight.add(gone, 100)
    inflight.update([here])
    now[0] += PERIOD_S
    inflight.update([engine(id="a", max_running=64, waiting=9)])
    assert inflight.limit(here) == 44 and (inflight.in_flight, inflight.tokens(gone)) == (1, 100)
    now[0] += PERIOD_S
    inflight.update([here])
    assert inflight.limit(here) == 44, "idle, not forgotten"


class Heartbeats:
    """A window and the engine's reports to it, one a period."""

    def __init__(self, **facts) -> None:
        self.facts = {"max_running": 64} | facts
        self.now = 0.0
        self.limit = AimdLimit(engine(**self.facts), self.now)

    def fill(self) -> None:
        while self.limit.has_capacity():
            self.limit.in_flight += 1

    def beat(self, seconds: float = PERIOD_S, **facts) -> int:
        self.now += seconds
        self.facts |= facts
        self.limit.observe(engine(**self.facts), self.now)
        return self.limit.size


def test_a_window_starts_at_what_the_engine_runs_and_grows_to_its_headroom_when_full_and_quiet() -> None:
    beats = Heartbeats()
    assert beats.limit.size == 64 and beats.beat() == 64, "the limit was not reached"
    beats.fill()
    assert beats.beat() == 68
    beats.fill()
    assert beats.beat() == 68, "the ceiling"


def test_a_window_shrinks_at_most_once_a_heartbeat_and_only_after_the_last_change_took_effect() -> None:
    beats = Heartbeats()
    beats.fill()
    assert beats.beat(waiting=8) == 64, "a few that wait keep the engine busy"
    assert beats.beat(waiting=9) == 44
    assert beats.beat(PERIOD_S / 2) == 44
    assert beats.beat() == 44, "64 are still in flight"
    beats.limit.in_flight = 44
    assert beats.beat() == 31
    beats.limit.in_flight = 0
    assert beats.beat(PERIOD_S / 2) == 31, "the period begins anew with each change"
    for _ in range(10):
        beats.beat()
    assert beats.limit.size == 4, "the floor"


def test_it_comes_back_step_by_step() -> None:
    beats = Heartbeats()
    beats.beat(waiting=100)
    sizes = []
    for _ in range(7):
        beats.fill()
        sizes.append(beats.beat(waiting=0))
    assert sizes == [48, 52, 56, 60, 64, 68, 68]


def test_a_retraction_is_a_reason_to_shrink_once() -> None:
    beats = Heartbeats(retractions=5)
    assert beats.beat() == 64, "those before its time are not its own"
    assert beats.beat(retractions=6) == 44
    assert beats.beat() == 44


def test_a_limit_that_was_reached_before_it_shrank_grows_only_when_it_is_reached_again() -> None:
    beats = Heartbeats()
    beats.fill()
    assert beats.beat(waiting=9) == 44
    beats.limit.in_flight = 0
    assert beats.beat(waiting=0) == 44
    beats.fill()
    assert beats.beat() == 48


@pytest.mark.parametrize(("waiting", "size"), [(0, 68), (4, 68), (5, 64), (8, 64), (9, 44)])
def test_a_full_window_grows_while_at_most_its_headroom_waits(waiting: int, size: int) -> None:
    beats = Heartbeats()
    beats.fill()
    assert beats.beat(waiting=waiting) == size
    beats.limit.in_flight = 0
    assert beats.beat(waiting=0) == size, "it was not reached since"


@pytest.mark.parametrize(
    ("max_running", "ceiling", "floor"), [(1, 3, 1), (16, 18, 1), (47, 49, 2), (48, 51, 3), (64, 68, 4)]
)
def test_headroom_and_floor_are_a_sixteenth_but_never_nothing(max_running: int, ceiling: int, floor: int) -> None:
    beats = Heartbeats(max_running=max_running)
    for _ in range(3):
        beats.fill()
        beats.beat()
    assert beats.limit.size == ceiling
    beats.limit.in_flight = 0
    for _ in range(20):
        beats.beat(waiting=1000)
    assert beats.limit.size == floor


def test_one_later_turn_beyond_the_window_counts_too() -> None:
    beats = Heartbeats()
    beats.fill()
    assert beats.limit.has_capacity(returning=True)
    beats.limit.in_flight += 1
    assert beats.beat(retractions=1) == 44


def test_an_engine_that_does_not_say_what_it_runs_is_given_much() -> None:
    assert Heartbeats(max_running=0).limit.size == UNKNOWN_CAPACITY


def test_a_later_turn_may_exceed_the_window_of_the_engine_that_holds_its_prefix() -> None:
    inflight = InflightTracker(adaptive=True, clock=lambda: 0.0)
    small = engine(max_running=10)
    for _ in range(10):
        inflight.add(small, 1)
    assert not inflight.has_capacity(small) and inflight.has_capacity(small, returning=True)
    for _ in range(5):
        inflight.add(small, 1)
    assert not inflight.has_capacity(small, returning=True)


def test_an_engine_whose_later_turns_go_beyond_the_window_shrinks_it_too() -> None:
    beats = Heartbeats()
    beats.fill()
    while beats.limit.has_capacity(returning=True):
        beats.limit.in_flight += 1
    assert beats.limit.in_flight == 96 and beats.beat(retractions=1) == 44
    assert beats.beat(retractions=2) == 44, "96 are still in flight"
    beats.limit.in_flight = 65
    assert beats.limit.has_capacity(returning=True)
    assert beats.beat(retractions=3) == 31
