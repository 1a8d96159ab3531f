"""The retriever's client against a real HTTP server with scripted faults, one query at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from protocol.search import MAX_QUERY_CHARS
from rollout_server.search import retry, transport
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from rollout_server.search.limiter import START
from rollout_server.search.transport import Dialect
from tests.support.fake_search import HTML, FakeRetriever, Fault

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
async def retriever() -> AsyncIterator[FakeRetriever]:
    async with FakeRetriever() as server:
        yield server


@pytest.fixture
async def search(retriever: FakeRetriever) -> AsyncIterator[HttpSearch]:
    service = HttpSearch(HttpSearchSettings(urls=(retriever.url,), deadline_s=2))
    yield service
    await service.close()


async def test_a_query_brings_passages_best_first_and_no_more_than_asked_for(
    retriever: FakeRetriever, search: HttpSearch
) -> None:
    result = await search("emma")
    assert retriever.asked == [{"queries": ["emma"], "topk": 3, "return_scores": True, "partial": True}]
    assert [(p.id, p.title, p.text) for p in result.passages] == [(f"emma#{i}", f"T{i}", "emma") for i in range(3)]
    assert result.error == "" and 0 < result.latency_s < 2


async def test_the_other_dialect_is_a_setting(retriever: FakeRetriever) -> None:
    settings = HttpSearchSettings(urls=(retriever.url,), dialect="flashrag", topk=2)
    flashrag = HttpSearch(settings)
    assert [p.id for p in (await flashrag("emma")).passages] == ["emma#0", "emma#1"]
    assert retriever.asked == [{"query": ["emma"], "top_n": 2, "return_score": False}]
    await flashrag.close()


@pytest.mark.parametrize("dialect", ["search_r1", "flashrag"])
async def test_a_lone_surrogate_in_an_answer_is_replaced_without_a_failure(
    retriever: FakeRetriever, dialect: Dialect
) -> None:
    hit = {"id": "p\ud83d", "contents": '"T"\nbefore \ud83d after'}
    body = [[hit]] if dialect == "flashrag" else {"result": [[{"document": hit}]]}
    retriever.script = lambda query: Fault(body=json.dumps(body))
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), dialect=dialect))
    result = await search("emma")
    await search.close()
    assert [(p.id, p.text) for p in result.passages] == [("p\ufffd", "before \ufffd after")]
    assert result.error == "" and len(retriever.asked) == 1 and not search.outage


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.fault(36)
async def test_a_busy_or_broken_server_is_asked_again(
    retriever: FakeRetriever, search: HttpSearch, status: int
) -> None:
    retriever.then(Fault(status), Fault(status))
    assert len((await search("emma")).passages) == 3
    assert retriever.queries == ["emma"] * 3


async def test_each_attempt_waits_longer_than_the_one_before(
    retriever: FakeRetriever, search: HttpSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(retry, "backoff_s", lambda failures, *_: pauses.append(failures) or 0.0)
    retriever.then(Fault(503), Fault(503))
    assert (await search("emma")).passages and pauses == [1, 2]


NAMED = {
    "not_json": [HTML, Fault(body=b"\xff\xfe\x00"), Fault(body="[" * 100_000), Fault(body="")],
    "bad_shape": [
        *(Fault(body=body) for body in ([], {}, {"error": "no"}, {"result": None}, {"result": {"0": []}}, "7", "null")),
        *(Fault(body={"result": [hits]}) for hits in (None, [{}], [{"document": {"id": "p"}}], [{"contents": "x"}])),
        Fault(body={"result": [[{"document": {"contents": ["x"]}}]]}),
    ],
    "wrong_count": [Fault(body={"result": []}), Fault(body={"result": [[], []]})],
    "http_404": [Fault(404)],
    "http_302": [Fault(302, "", headers={"Location": "/elsewhere"})],
    "http_500": [Fault(500, {"error": "no"})],
}


@pytest.mark.parametrize(("cause", "fault"), [(cause, fault) for cause, faults in NAMED.items() for fault in faults])
@pytest.mark.fault(37)
async def test_an_invalid_answer_is_retried_and_then_a_named_failure(
    retriever: FakeRetriever, search: HttpSearch, cause: str, fault: Fault
) -> None:
    retriever.script = lambda query: fault if query == "bad" else None
    assert (await search("good")).error == ""
    result = await search("bad")
    assert (result.passages, result.error) == ((), cause)
    assert retriever.queries.count("bad") == 4
    assert search.balancer.counts[f"search_faults_{cause}"] == 4
    assert (await search("good")).error == "" and search.outage == "", "one bad query is the query's fault"


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("http_400", Fault(400)),
        ("too_large", Fault(body="x" * (5 << 20))),
        ("failed_index", Fault(body={"result": [[]], "errors": ["index"]})),
        ("failed_quota_of_today", Fault(body={"result": [[]], "errors": ["Quota of <today>!"]})),
        ("failed_unnamed", Fault(body={"result": [[]], "errors": ["\u2028"]})),
    ],
)
async def test_a_permanent_failure_is_not_retried(
    retriever: FakeRetriever, search: HttpSearch, cause: str, fault: Fault
) -> None:
    retriever.script = lambda query: fault
    result = await search("bad")
    assert (result.passages, result.error, len(retriever.asked)) == ((), cause, 1)


@pytest.mark.fault(37)
async def test_a_body_is_not_read_beyond_its_cap(retriever: FakeRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_BYTES", 2048)
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,)))
    retriever.contents = lambda query, i: "x" * (100 if query == "short" else 3000)
    results = [await search(query) for query in ("short", "long")]
    await search.close()
    assert [r.error for r in results] == ["", "too_large"]


@pytest.mark.parametrize(("fault", "cause"), [(Fault(429), "overloaded"), (Fault(hang=True), "timeout")])
@pytest.mark.fault(36)
async def test_the_deadline_holds_for_all_attempts_together(retriever: FakeRetriever, fault: Fault, cause: str) -> None:
    retriever.script = lambda query: fault if query == "emma" else None
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), deadline_s=0.5, attempt_s=0.25))
    result = await search("emma")
    await search.close()
    # the deadline may also fall into the last attempt
    assert result.error in (cause, "timeout") and 0.1 < result.latency_s < 1.5 and len(retriever.asked) >= 2


async def test_retry_after_is_respected_when_the_deadline_allows(retriever: FakeRetriever, search: HttpSearch) -> None:
    retriever.then(Fault(503, headers={"Retry-After": "1"}))
    result = await search("emma")
    assert result.passages and result.latency_s >= 1
    retriever.then(Fault(503, headers={"Retry-After": "60"}))
    assert ((await search("persuasion")).error, retriever.queries.count("persuasion")) == ("overloaded", 1)


async def test_a_dead_retriever_is_skipped_for_a_healthy_one(retriever: FakeRetriever) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
        search = HttpSearch(HttpSearchSettings(urls=(dead, retriever.url), deadline_s=5))
        # at once: the second goes to the other retriever, whichever the first was sent to
        results = await asyncio.gather(*(search(f"query {i}") for i in range(8)))
        assert search.outage == "" and search.balancer.gauges()["retrievers_healthy"]() == 1
        alone = HttpSearch(HttpSearchSettings(urls=(dead,), deadline_s=5, outage_wait_s=0.2))
        started = time.monotonic()
        nothing = await alone("emma")
        assert f"unreachable at {dead}" in alone.outage and time.monotonic() - started < 2
        await search.close()
        await alone.close()
    assert all(len(r.passages) == 3 for r in results)
    assert (nothing.passages, nothing.error) == ((), "unavailable")


async def test_a_connection_cut_in_the_middle_is_tried_again(retriever: FakeRetriever, search: HttpSearch) -> None:
    retriever.then(Fault(cut=True))
    assert len((await search("emma")).passages) == 3
    assert search.balancer.counts["search_faults_unreachable"] == 1 and search.balancer.counts["search_retries"] == 1


async def test_equal_queries_in_flight_share_one_request(retriever: FakeRetriever, search: HttpSearch) -> None:
    retriever.script = lambda query: Fault(after_s=0.1)
    results = await asyncio.gather(*(search(query) for query in ["emma"] * 5 + ["persuasion"]))
    assert sorted(retriever.queries) == ["emma", "persuasion"]
    assert all(len(result.passages) == 3 for result in results)
    await search("emma")
    assert len(retriever.asked) == 3  # nothing is kept: a cache is the retriever's affair


async def test_cancelling_one_waiter_does_not_affect_the_others(retriever: FakeRetriever, search: HttpSearch) -> None:
    retriever.script = lambda query: Fault(after_s=0.2)
    first, second = (asyncio.create_task(search("emma")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len((await second).passages) == 3 and len(retriever.asked) == 1


async def test_a_search_without_waiters_is_cancelled_and_does_not_affect_the_next(
    retriever: FakeRetriever, search: HttpSearch
) -> None:
    retriever.then(Fault(hang=True), Fault(hang=True))
    both = [asyncio.create_task(search("emma")) for _ in range(2)]
    await asyncio.sleep(0.05)
    for task in both:
        task.cancel()
    again = asyncio.create_task(search("emma"))  # asked while the first is being cancelled
    await asyncio.gather(*both, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert search.balancer.gauges()["searches_in_flight"]() == 1
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    await asyncio.sleep(0)
    assert search.balancer.gauges()["searches_in_flight"]() == 0, "their places are free"
    assert len((await search("emma")).passages) == 3


async def test_closing_ends_searches_in_flight_with_a_name(retriever: FakeRetriever, search: HttpSearch) -> None:
    retriever.script = lambda query: Fault(hang=True)
    waiting = asyncio.create_task(search("emma"))
    await asyncio.sleep(0.05)
    await search.close()
    assert (await waiting).error == "closed" and (await search("emma")).error == "closed"


async def test_requests_in_flight_are_bounded_and_connections_kept(retriever: FakeRetriever) -> None:
    retriever.script = lambda query: Fault(after_s=0.01)
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), connections=4, deadline_s=10))
    results = await asyncio.gather(*(search(f"query {i}") for i in range(40)))
    await search.close()
    assert all(not r.error for r in results)
    assert retriever.most_in_flight == 4 and len(retriever.connections) <= 5  # one of them asked for /info


async def test_a_query_longer_than_the_protocol_allows_is_cut(retriever: FakeRetriever, search: HttpSearch) -> None:
    assert not (await search("x" * 10 * MAX_QUERY_CHARS)).error
    assert len(retriever.queries[0]) == MAX_QUERY_CHARS


async def test_counts_go_into_the_given_counters(retriever: FakeRetriever, search: HttpSearch) -> None:
    counts: Counter[str] = Counter(a=1)
    gauges: dict = {}
    search.report(counts, gauges)
    retriever.then(Fault(500))
    await search("emma")
    assert (counts["a"], counts["search_faults_http_500"], counts["search_retries"]) == (1, 1, 1)
    values = {name: read() for name, read in gauges.items()}
    assert (values["retrievers"], values["retrievers_healthy"], values["search_breaker"]) == (1, 1, 0)
    assert values["search_window"] == START and values["searches_in_flight"] == values["searches_queued"] == 0


def test_one_address_may_be_written_without_a_list() -> None:
    assert HttpSearchSettings.model_validate({"urls": "http://a:1/"}).urls == ("http://a:1/",)


def test_an_attempt_must_leave_time_for_another() -> None:
    with pytest.raises(ValueError, match="half of deadline_s"):
        HttpSearchSettings(deadline_s=10, attempt_s=6)
