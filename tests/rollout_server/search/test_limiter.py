"""The limit of requests at one retriever: pure, tested with a simulated server and clock."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.search.limiter import FLOOR, START, GradientLimit


def limit(ceiling: int = 512, timeout_s: float = 10.0, **facts: int) -> GradientLimit:
    return GradientLimit(ceiling=ceiling, timeout_s=timeout_s, **facts)


def rounds(w: GradientLimit, number: int, latency_s: float) -> None:
    """Repeat: answer everything in flight after latency_s; each answer admits further requests."""
    flying = [w.acquire() for _ in range(w.size - w.in_flight)]
    for _ in range(number):
        sent, flying = flying, []
        for each in sent:
            w.on_success(each, latency_s)
            while w.has_capacity():
                flying.append(w.acquire())
    for _ in flying:
        w.on_ignored()


def test_it_doubles_a_round_until_it_meets_its_ceiling_while_answers_are_quick() -> None:
    w = limit(ceiling=800)
    assert (w.size, w.in_flight) == (START, 0)
    rounds(w, 1, 0.01)
    assert 1.75 * START <= w.size <= 2 * START
    rounds(w, 5, 0.01)
    assert w.size == 800


def test_it_does_not_grow_on_few_answers() -> None:
    w = limit()
    for _ in range(1000):
        w.on_success(w.acquire(), 0.01)
    assert w.size == START


def test_after_it_has_shrunk_it_grows_by_one_a_round() -> None:
    w = limit()
    sent = [w.acquire() for _ in range(w.size)]
    for each in sent:
        w.on_dropped(each)
    assert w.size == int(0.7 * START), "a round that was refused as a whole is one decrease"
    before = w.size
    rounds(w, 3, 0.01)
    assert before + 2 <= w.size <= before + 3


def test_latency_beyond_the_target_shrinks_it_once_a_round() -> None:
    w = limit(ceiling=64)
    rounds(w, 2, 0.1)
    assert (w.size, w.target_s) == (64, pytest.approx(1.2))
    rounds(w, 1, 5.0)
    assert w.size == int(0.7 * 64)


def test_quick_answers_of_a_cache_do_not_make_a_search_look_slow() -> None:
    w = limit()
    for _ in range(300):
        for took in (0.9, 0.9, 0.0003, 0.9):
            while w.has_capacity():
                w.acquire()
            w.on_success(w._next - 1, took)
    assert w.size > START


def test_the_least_latency_of_a_slower_server_is_measured_again() -> None:
    w = limit(ceiling=8)
    rounds(w, 2, 0.01)
    assert w.target_s == 0.5
    sizes = []
    for _ in range(200):
        rounds(w, 1, 2.0)
        sizes.append(w.size)
    assert min(sizes) == FLOOR
    assert w.target_s == 2.5 and w.size == 8, "never more than a quarter of the time of an attempt"


def test_after_an_outage_it_starts_small_and_ignores_earlier_requests() -> None:
    w = limit()
    old = [w.acquire() for _ in range(20)]
    w.reset()
    assert (w.size, w.in_flight, w.has_capacity()) == (FLOOR, 20, False)
    for each in old:
        w.on_dropped(each)
    assert (w.size, w.in_flight, w.has_capacity()) == (FLOOR, 0, True)


def test_a_request_that_is_given_up_frees_its_place_and_changes_nothing() -> None:
    w = limit(ceiling=1)
    w.acquire()
    assert not w.has_capacity()
    w.on_ignored()
    assert w.has_capacity() and w.size == 1


@given(st.lists(st.tuples(st.sampled_from("sarex"), st.floats(0, 20)), max_size=300), st.integers(1, 64))
@settings(max_examples=50)
def test_whatever_happens_it_stays_within_its_bounds(events: list[tuple[str, float]], ceiling: int) -> None:
    w = limit(ceiling=ceiling)
    flying: list[int] = []
    for kind, took in events:
        if kind == "s" and w.has_capacity():
            flying.append(w.acquire())
        elif kind == "x":
            w.reset()
        elif flying:
            each = flying.pop(0)
            if kind == "a":
                w.on_success(each, took)
            elif kind == "r":
                w.on_dropped(each)
            else:
                w.on_ignored()
        assert min(FLOOR, ceiling) <= w.size <= ceiling and w.in_flight == len(flying)


def simulate(windows: list[GradientLimit], *, places: int, service_s: float, seconds: float) -> tuple[list[int], float]:
    """A server with `places` that takes service_s a query, all windows always full.

    Returns the answers of each window in the second half of the time, and the longest latency there.
    """
    now, free_at, answered, slowest = 0.0, [0.0] * places, [0] * len(windows), 0.0
    events: list[tuple[float, int, int, float]] = []
    while now < seconds:
        for who, w in enumerate(windows):
            while w.has_capacity():
                done = max(now, heapq.heappop(free_at)) + service_s
                heapq.heappush(free_at, done)
                heapq.heappush(events, (done, who, w.acquire(), now))
        now, who, number, sent = heapq.heappop(events)
        windows[who].on_success(number, now - sent)
        if now > seconds / 2:
            answered[who] += 1
            slowest = max(slowest, now - sent)
    return answered, slowest


def test_two_servers_share_a_slow_retriever_fairly_keep_it_busy_and_its_queue_short() -> None:
    early, late = limit(), limit(start=FLOOR)
    answered, slowest = simulate([early, late], places=8, service_s=0.1, seconds=400)
    assert sum(answered) > 0.99 * 80 * 200, "the retriever is never idle"
    assert min(answered) > 0.25 * max(answered), answered
    assert slowest < 4, "answers come well before anybody gives up"
