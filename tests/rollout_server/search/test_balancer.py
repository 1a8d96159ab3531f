"""Several retrievers and many searches: routing, queueing, and that an outage costs only time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest

from rollout_server.search import balancer, replica
from rollout_server.search.base import SearchError
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from tests.support.fake_search import HTML, FakeRetriever, Fault
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def short_pauses_in_the_end(short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MAX_PAUSE_S", 0.1)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeRetriever, FakeRetriever]]:
    async with FakeRetriever(fingerprint="one") as a, FakeRetriever(fingerprint="one") as b:
        yield a, b


class Client:
    """A search over some retrievers, and its gauges."""

    def __init__(self, *retrievers: FakeRetriever, **settings: object) -> None:
        given = {"urls": [r.url for r in retrievers], "deadline_s": 30.0, "attempt_s": 1.0, "probe_s": 0.5}
        self.search = HttpSearch(HttpSearchSettings.model_validate(given | settings))
        self.counts = self.search.balancer.counts

    def gauge(self, name: str) -> float:
        return self.search.balancer.gauges()[name]()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.search.close()

    def start(self, number: int, name: str = "query") -> list[asyncio.Task]:
        return [asyncio.create_task(self.search(f"{name} {i}")) for i in range(number)]

    async def errors(self, number: int, name: str = "query") -> set[str]:
        return {result.error for result in await asyncio.gather(*self.start(number, name))}


async def test_the_least_busy_of_the_healthy_is_asked(pair: tuple[FakeRetriever, FakeRetriever]) -> None:
    slow, quick = pair
    slow.script = lambda query: Fault(after_s=0.2)
    quick.script = lambda query: Fault(after_s=0.01)
    async with Client(slow, quick, connections=8) as client:
        assert await client.errors(80) == {""}
    assert len(quick.asked) > 2 * len(slow.asked) > 0


@pytest.mark.parametrize(
    "fault",
    [Fault(hang=True), Fault(500), HTML, Fault(cut=True), Fault(503)],
    ids=["hang", "500", "HTML", "cut", "503"],
)
@pytest.mark.fault(36)
async def test_a_replica_that_fails_costs_no_search_is_ejected_and_readmitted(
    pair: tuple[FakeRetriever, FakeRetriever], fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    sick, well = pair
    sick.script = lambda query: fault
    sick.ready = fault.status != 503
    async with Client(sick, well) as client:
        for turn in range(4):
            assert await client.errors(10, f"turn {turn}") == {""}
        assert client.gauge("retrievers_healthy") == 1 and client.search.outage == ""
        said = {r.getMessage().partition(": ")[0] for r in caplog.records if r.getMessage().startswith("ejecting")}
        assert said == {f"ejecting retriever {sick.url}"}
        assert client.counts["retriever_ejections"] > 0 and client.counts["search_outages"] == 0
        before = len(sick.asked)
        assert await client.errors(20, "later") == {""}
        assert len(sick.asked) - before <= 3, "probes only"
        sick.script, sick.ready = lambda query: None, True
        await eventually(lambda: client.gauge("retrievers_healthy") == 2, "it is taken back")
        assert await client.errors(20, "again") == {""} and "again" in " ".join(sick.queries)


async def test_retry_after_of_one_replica_does_not_bind_the_others(pair: tuple[FakeRetriever, FakeRetriever]) -> None:
    busy, idle = pair
    busy.script = lambda query: Fault(429, headers={"Retry-After": "60"})
    async with Client(busy, idle) as client:
        started = time.monotonic()
        assert await client.errors(20) == {""} and time.monotonic() - started < 30, "not a minute"
        assert client.counts["search_faults_overloaded"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "hung", "500", "HTML", "503", "no paths for probes"])
@pytest.mark.fault(36)
async def test_an_outage_of_all_costs_time_and_no_search(way: str) -> None:
    async with FakeRetriever() as retriever, Client(retriever, outage_wait_s=10) as client:
        faults = {"hung": Fault(hang=True), "500": Fault(500), "HTML": HTML, "503": Fault(503)}
        if way == "no paths for probes":
            retriever.ready = None
        assert await client.errors(5, "before") == {""}
        retriever.script = lambda query: Fault(after_s=0.1)
        searches = client.start(30, "during")
        await asyncio.sleep(0.05)
        if way in faults:
            retriever.script, retriever.ready = (lambda query: faults[way]), way not in ("hung", "503")
        else:
            await retriever.stop()
        searches += client.start(30, "later")
        await eventually(lambda: client.search.outage, "the breaker opens", 2)
        assert client.gauge("search_breaker") > 0 and client.counts["search_outages"] == 1
        await asyncio.sleep(0.3)
        searches += client.start(10, "in the middle")
        assert not any(task.done() for task in searches[-40:]), "they wait"
        asked = len(retriever.asked)
        await asyncio.sleep(0.2)
        assert len(retriever.asked) - asked <= 5, "an ejected replica gets no load"
        if way in faults:
            retriever.script, retriever.ready = (lambda query: None), True
        else:
            await retriever.start()
        results = await asyncio.gather(*searches)
        assert {r.error for r in results} == {""} and all(r.passages for r in results)
        assert client.search.outage == "" and client.gauge("search_breaker") == 0


async def test_an_outage_that_lasts_too_long_has_a_name() -> None:
    async with (
        FakeRetriever() as retriever,
        Client(retriever, outage_wait_s=0.4, deadline_s=0.6, attempt_s=0.3, probe_s=0.2) as client,
    ):
        assert await client.errors(1) == {""}
        await retriever.stop()
        started = time.monotonic()
        assert await client.errors(10) == {"unavailable"}
        assert time.monotonic() - started >= 0.4
        await retriever.start()
        await eventually(lambda: not client.search.outage, "it is readmitted without any search", 2)
        assert await client.errors(10) == {""}


async def test_no_search_waits_longer_than_both_limits_together() -> None:
    async with (
        FakeRetriever() as retriever,
        Client(retriever, outage_wait_s=0.6, deadline_s=0.6, attempt_s=0.3, probe_s=0.2) as client,
    ):
        # healthy enough to be readmitted each time, but unable to answer
        retriever.script = lambda query: None if query.startswith("who wrote") else Fault(500)
        results = await asyncio.gather(*client.start(20))
        assert all(r.error in ("http_500", "unavailable", "timeout") and r.latency_s < 1.2 + 0.3 for r in results)


async def test_a_cancelled_search_leaves_the_queue() -> None:
    async with FakeRetriever() as retriever, Client(retriever, connections=1, attempt_s=2) as client:
        retriever.then(Fault(after_s=0.3))
        searches = client.start(5)
        await eventually(lambda: client.gauge("searches_queued") == 4, "four wait behind one")
        searches[1].cancel()
        searches[3].cancel()
        await asyncio.sleep(0)
        results = await asyncio.gather(*searches, return_exceptions=True)
        assert [type(r).__name__ for r in results].count("CancelledError") == 2
        assert retriever.queries == ["query 0", "query 2", "query 4"], "first come, first served"
        assert client.gauge("searches_queued") == client.gauge("searches_in_flight") == 0


async def test_a_search_that_is_cancelled_just_as_its_turn_comes_passes_it_on() -> None:
    async with FakeRetriever() as retriever, Client(retriever, connections=1) as client:
        balancer = client.search.balancer
        permit = await balancer.acquire(())
        first, second = (asyncio.create_task(balancer.acquire(())) for _ in range(2))
        await asyncio.sleep(0)
        balancer.release(permit)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).replica.url == retriever.url


async def test_a_search_that_is_cancelled_as_the_last_retriever_is_ejected_ends_as_cancelled() -> None:
    async with FakeRetriever() as retriever, Client(retriever, connections=1) as client:
        balancer = client.search.balancer
        permit = await balancer.acquire(())
        waiting = asyncio.create_task(balancer.acquire(()))
        await asyncio.sleep(0)
        balancer.failed(permit, SearchError("unreachable", served=False, refused=True), 0.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_queue_longer_than_the_limit_is_backpressure() -> None:
    async with FakeRetriever() as retriever, Client(retriever, connections=2) as client:
        retriever.script = lambda query: Fault(after_s=0.05)
        searches = client.start(5)
        await eventually(lambda: client.search.backpressure, "three stand in line, two are in flight")
        await asyncio.gather(*searches[:2])
        assert not client.search.backpressure
        await asyncio.gather(*searches)


async def test_a_burst_on_a_small_server_loses_nothing_and_is_slowed_down() -> None:
    """429 for whatever goes beyond 8 at a time."""
    async with FakeRetriever() as retriever, Client(retriever, deadline_s=10, attempt_s=2) as client:
        retriever.script = lambda query: Fault(429) if retriever._in_flight > 8 else Fault(after_s=0.02)
        assert await client.errors(400) == {""}
        assert client.counts["search_faults_overloaded"] > 0 and client.gauge("search_window") < 32
        assert client.counts["search_retries"] < 400


async def test_replicas_with_different_indexes_are_a_warning(
    pair: tuple[FakeRetriever, FakeRetriever], caplog: pytest.LogCaptureFixture
) -> None:
    pair[1].fingerprint = "two"
    with caplog.at_level(logging.WARNING):
        async with Client(*pair) as client:
            await client.search("emma")
            await eventually(lambda: client.gauge("retriever_fingerprints") == 2, "both are known")
    assert [r.message for r in caplog.records if "serves a different index" in r.message]


async def test_closing_in_the_middle_of_an_outage_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeRetriever() as retriever:
        client = Client(retriever)
    searches = client.start(5)
    await eventually(lambda: client.search.outage, "no server listens")
    assert not [r for r in caplog.records if r.levelno == logging.ERROR], "the address may be right"
    await client.search.close()
    assert {(await task).error for task in searches} == {"closed"}
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ready", [True, None], ids=["a service without searches", "a path that is wrong"])
async def test_a_wrong_address_is_reported_and_again_at_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ready: bool | None
) -> None:
    monkeypatch.setattr(balancer, "REMIND_S", 0.2)
    async with FakeRetriever(lambda query: Fault(404)) as retriever, Client(retriever, outage_wait_s=10) as client:
        retriever.ready = ready
        searches = client.start(5)
        await eventually(lambda: client.search.outage == f"http_404 at {retriever.url}", "the breaker opens")

        def said() -> list[str]:
            return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]

        await eventually(lambda: len(said()) >= 3, "it is said again")
        assert all("POST /retrieve" in text and "rollout.search.urls" in text for text in said())
        assert not any("ejecting" in r.getMessage() for r in caplog.records), "the error says more"
        retriever.script = lambda query: None  # a proxy, and its server is back
        assert {r.error for r in await asyncio.gather(*searches)} == {""}
        assert client.search.outage == ""
