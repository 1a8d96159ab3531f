"""When a retriever is put aside, what brings it back, and what the breaker makes of it. Pure."""

from __future__ import annotations

import pytest

from rollout_server.search.balancer import Breaker, State
from rollout_server.search.base import Fault, named_by_server, status_fault
from rollout_server.search.limiter import Window
from rollout_server.search.replica import Proof, Replica, Verdict


def replica(url: str = "http://a") -> Replica:
    return Replica(url, Window(ceiling=64, patience_s=5))


def test_nobody_listening_is_enough() -> None:
    r = replica()
    assert r.failed(Fault("unreachable", served=False, refused=True)) is Verdict.DOWN
    assert (r.up, r.proof, r.cause) == (False, Proof.READY, "unreachable")


def test_three_bad_answers_in_a_row_are_enough_and_a_good_one_between_is_not() -> None:
    r = replica()
    for _ in range(5):
        assert r.failed(Fault("not_json")) is Verdict.FINE
        assert r.failed(Fault("bad_shape")) is Verdict.FINE
        r.succeeded("emma")
    for verdict in (Verdict.FINE, Verdict.FINE, Verdict.DOWN):
        assert r.failed(Fault("not_json")) is verdict
    assert (r.up, r.proof, r.good_query) == (False, Proof.QUERY, "emma")
    assert r.failed(Fault("not_json")) is Verdict.FINE, "it is down already"


def test_half_of_many_is_enough_and_busy_counts_there_and_only_there() -> None:
    r = replica()
    for _ in range(15):
        assert r.failed(Fault("overloaded")) is not Verdict.DOWN
    for _ in range(16):
        r.succeeded("q")
    assert r.failed(Fault("overloaded")) is Verdict.DOWN and r.proof is Proof.QUERY


@pytest.mark.parametrize("cause", ["timeout", "unreachable", "overloaded", "http_500", "http_503"])
def test_what_may_mean_that_it_is_gone_is_looked_into_once_at_a_time(cause: str) -> None:
    r = replica()
    assert r.failed(Fault(cause)) is Verdict.DOUBTFUL
    r.looking = True
    assert r.failed(Fault(cause)) is Verdict.FINE


def test_probes_come_less_and_less_often_and_start_anew_after_the_next_failure() -> None:
    r = replica()
    r.put_aside("timeout", Proof.READY)
    assert [round(r.next_pause(), 2) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    r.bring_back()
    assert r.up and r.window.size == 4
    r.put_aside("timeout", Proof.READY)
    assert r.next_pause() == 0.1


def test_the_breaker_is_closed_while_one_can_be_used() -> None:
    a, b = replica("http://a"), replica("http://b/")
    breaker = Breaker([a, b])
    a.put_aside("timeout", Proof.READY)
    assert (breaker.state, breaker.reason, breaker.state.gauge) == (State.CLOSED, "", 0)
    b.put_aside("not_json", Proof.QUERY)
    assert (breaker.state, breaker.state.gauge) == (State.OPEN, 1)
    assert breaker.reason == "timeout at http://a, not_json at http://b"
    b.looking = True
    assert (breaker.state, breaker.state.gauge) == (State.HALF_OPEN, 0.5)
    b.bring_back()
    assert breaker.usable and breaker.reason == ""


@pytest.mark.parametrize(
    ("status", "cause", "again"),
    [(429, "overloaded", True), (503, "overloaded", True), (404, "http_404", True), (422, "http_422", False)],
)
def test_statuses_have_names(status: int, cause: str, again: bool) -> None:
    fault = status_fault(status, "Fri, 31 Dec 1999 23:59:59 GMT")
    assert (fault.cause, fault.again, fault.wait_s) == (cause, again, 0)
    assert status_fault(status, "7").wait_s == 7


@pytest.mark.parametrize(
    ("word", "cause"),
    [("timeout", "failed_timeout"), ("HTTP 402: pay!", "failed_http_402_pay"), ("\n" * 500, "failed_unnamed")],
)
def test_a_strangers_name_for_a_failure_is_made_harmless(word: str, cause: str) -> None:
    assert named_by_server(word).cause == cause
    assert len(named_by_server("x" * 10_000).cause) == len("failed_") + 32
