"""When a retriever is ejected, what readmits it, and what the circuit breaker makes of it. Pure."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rollout_server.search.balancer import BreakerState, CircuitBreaker
from rollout_server.search.base import SearchError, error_named_by_server, error_of_status
from rollout_server.search.batching import QueryBatcher
from rollout_server.search.limiter import GradientLimit
from rollout_server.search.replica import QUERY, HealthCheck, HealthVerdict, Replica, probe
from rollout_server.search.transport import SearchTransport


def replica(url: str = "http://a") -> Replica:
    batcher = QueryBatcher(SearchTransport("search_r1", topk=3), url, ceiling=64, attempt_s=5)
    return Replica(url, GradientLimit(ceiling=64, timeout_s=5), batcher)


def test_a_refused_connection_ejects_at_once() -> None:
    r = replica()
    assert r.failed(SearchError("unreachable", served=False, refused=True)) is HealthVerdict.DOWN
    assert (r.healthy, r.health_check, r.cause) == (False, HealthCheck.READY, "unreachable")


def test_three_bad_answers_in_a_row_are_enough_and_a_good_one_between_is_not() -> None:
    r = replica()
    for _ in range(5):
        assert r.failed(SearchError("not_json")) is HealthVerdict.FINE
        assert r.failed(SearchError("bad_shape")) is HealthVerdict.FINE
        r.succeeded("emma")
    for verdict in (HealthVerdict.FINE, HealthVerdict.FINE, HealthVerdict.DOWN):
        assert r.failed(SearchError("not_json")) is verdict
    assert (r.healthy, r.health_check, r.good_query) == (False, HealthCheck.QUERY, "emma")
    assert r.failed(SearchError("not_json")) is HealthVerdict.FINE, "it is down already"


def test_half_of_many_is_enough_and_busy_counts_there_and_only_there() -> None:
    r = replica()
    for _ in range(15):
        assert r.failed(SearchError("overloaded")) is not HealthVerdict.DOWN
    for _ in range(16):
        r.succeeded("q")
    assert r.failed(SearchError("overloaded")) is HealthVerdict.DOWN and r.health_check is HealthCheck.QUERY


@pytest.mark.parametrize("cause", ["timeout", "unreachable", "overloaded", "http_500", "http_503"])
def test_a_doubtful_failure_is_probed_once_at_a_time(cause: str) -> None:
    r = replica()
    assert r.failed(SearchError(cause)) is HealthVerdict.DOUBTFUL
    r.probing = True
    assert r.failed(SearchError(cause)) is HealthVerdict.FINE


async def test_a_probe_repeats_the_last_query_that_was_answered() -> None:
    class Asked(list[str]):
        async def search(self, url: str, query: str, timeout_s: float) -> None:
            self.append(query)

    r, asked = replica(), Asked()
    for _ in range(2):
        assert await probe(cast(Any, asked), r, HealthCheck.QUERY, ready_s=1, query_s=1) == ""
        r.succeeded("emma")
    assert asked == [QUERY, "emma"]


def test_pauses_between_probes_grow_and_restart_after_the_next_failure() -> None:
    r = replica()
    r.eject("timeout", HealthCheck.READY)
    assert [round(r.next_pause(), 2) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    r.readmit()
    assert r.healthy and r.limit.size == 4
    r.eject("timeout", HealthCheck.READY)
    assert r.next_pause() == 0.1


def test_the_breaker_is_closed_while_one_can_be_used() -> None:
    a, b = replica("http://a"), replica("http://b/")
    breaker = CircuitBreaker([a, b])
    a.eject("timeout", HealthCheck.READY)
    assert (breaker.state, breaker.reason, breaker.state.gauge) == (BreakerState.CLOSED, "", 0)
    b.eject("not_json", HealthCheck.QUERY)
    assert (breaker.state, breaker.state.gauge) == (BreakerState.OPEN, 1)
    assert breaker.reason == "timeout at http://a, not_json at http://b"
    b.probing = True
    assert (breaker.state, breaker.state.gauge) == (BreakerState.HALF_OPEN, 0.5)
    b.readmit()
    assert breaker.usable and breaker.reason == ""


@pytest.mark.parametrize(
    ("status", "cause", "again"),
    [(429, "overloaded", True), (503, "overloaded", True), (404, "http_404", True), (422, "http_422", False)],
)
def test_statuses_have_names(status: int, cause: str, again: bool) -> None:
    fault = error_of_status(status, "Fri, 31 Dec 1999 23:59:59 GMT")
    assert (fault.cause, fault.retryable, fault.retry_after_s) == (cause, again, 0)
    assert error_of_status(status, "7").retry_after_s == 7


@pytest.mark.parametrize(
    ("word", "cause"),
    [("timeout", "failed_timeout"), ("HTTP 402: pay!", "failed_http_402_pay"), ("\n" * 500, "failed_unnamed")],
)
def test_a_failure_name_of_a_server_is_sanitised(word: str, cause: str) -> None:
    assert error_named_by_server(word).cause == cause
    assert len(error_named_by_server("x" * 10_000).cause) == len("failed_") + 32


def test_a_replica_that_was_readmitted_has_three_strikes_again() -> None:
    r = replica()
    for _ in range(2):
        r.failed(SearchError("not_json"))
    r.eject("timeout", HealthCheck.READY)
    r.readmit()
    for verdict in (HealthVerdict.FINE, HealthVerdict.FINE, HealthVerdict.DOWN):
        assert r.failed(SearchError("not_json")) is verdict
