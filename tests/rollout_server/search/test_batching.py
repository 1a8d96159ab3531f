"""Queries share POSTs, and each keeps its own answer, error, timeout, cancellation and retries. On real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from protocol.search import MAX_TOPK
from rollout_server.search.base import SearchError, SearchResult
from rollout_server.search.batching import MAX_HITS, MAX_QUERIES, MIN_POSTS, QueryBatcher
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from rollout_server.search.transport import PATHS, Dialect, SearchTransport
from tests.support.fake_search import HTML, FakeRetriever, Fault
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("short_pauses")
HOLD = "hold"
"""A query that `Sharing.hold` keeps in flight until `Sharing.gate` is set."""


class Sharing:
    """A search over retrievers whose queries share POSTs, with one slot at each."""

    def __init__(self, *retrievers: FakeRetriever, **settings: object) -> None:
        given = {"urls": [r.url for r in retrievers], "deadline_s": 20.0, "attempt_s": 5.0}
        self.search = HttpSearch(HttpSearchSettings.model_validate(given | settings))
        self.balancer, self._retrievers = self.search.balancer, retrievers
        self.gate = asyncio.Event()
        self.batchers = [replica.batcher for replica in self.balancer.replicas]

    async def __aenter__(self) -> Sharing:
        assert (await self.search("first")).error == ""
        await eventually(lambda: all(batcher.enabled for batcher in self.batchers), "they say that they have an index")
        for batcher in self.batchers:
            batcher.max_posts = 1
        for retriever in self._retrievers:
            retriever.asked.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.search.close()
        assert not any(batcher._posts for batcher in self.batchers)

    def start(self, *queries: str) -> list[asyncio.Task[SearchResult]]:
        return [asyncio.create_task(self.search(query)) for query in queries]

    async def hold(self, retriever: FakeRetriever) -> asyncio.Task[SearchResult]:
        """Occupy the only slot."""
        retriever.then(Fault(until=self.gate))
        (task,) = self.start(HOLD)
        await eventually(lambda: retriever.posts[-1:] == [[HOLD]], "its POST is in flight")
        return task


@pytest.fixture
async def retriever() -> AsyncIterator[FakeRetriever]:
    async with FakeRetriever(backend="index") as server:
        yield server


@pytest.fixture
async def sharing(retriever: FakeRetriever) -> AsyncIterator[Sharing]:
    async with Sharing(retriever) as opened:
        yield opened


async def own_passages(tasks: list[asyncio.Task[SearchResult]], queries: list[str]) -> None:
    results = await asyncio.gather(*tasks)
    assert [r.error for r in results] == [""] * len(queries)
    assert [[p.id for p in r.passages] for r in results] == [[f"{query}#{i}" for i in range(3)] for query in queries]


@pytest.mark.parametrize("dialect", PATHS)
async def test_those_that_wait_share_posts_up_to_the_bound_and_each_gets_its_own_answer(
    retriever: FakeRetriever, dialect: Dialect
) -> None:
    async with Sharing(retriever, dialect=dialect) as sharing:
        held = await sharing.hold(retriever)
        queries = [f"query {i}" for i in range(MAX_QUERIES + 20)]
        tasks = sharing.start(*queries)
        await asyncio.sleep(0)
        sharing.gate.set()
        await own_passages([held, *tasks], [HOLD, *queries])
        assert retriever.posts == [[HOLD], queries[:MAX_QUERIES], queries[MAX_QUERIES:]]


async def test_a_free_slot_takes_a_query_at_once(retriever: FakeRetriever, sharing: Sharing) -> None:
    (batcher,) = sharing.batchers
    batcher.max_posts = 2
    held = await sharing.hold(retriever)
    await own_passages(sharing.start("emma"), ["emma"])
    assert not held.done() and retriever.posts == [[HOLD], ["emma"]]
    await own_passages(sharing.start("a", "b"), ["a", "b"])
    assert retriever.posts[2:] == [["a", "b"]], "what arrives together is sent together"
    sharing.gate.set()
    await held


@pytest.mark.parametrize("backend", ["", "online"])
async def test_queries_to_other_servers_go_alone(backend: str) -> None:
    async with FakeRetriever(fingerprint="some", backend=backend) as server:
        search = HttpSearch(HttpSearchSettings(urls=(server.url,)))
        await search("first")
        await eventually(lambda: search.balancer.replicas[0].fingerprint, "its /info is read")
        await asyncio.gather(*(search(f"query {i}") for i in range(20)))
        await search.close()
        assert {len(post) for post in server.posts} == {1}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(400), "http_400"),
        (Fault(500), "http_500"),
        (HTML, "not_json"),
        (Fault(body={"result": []}), "wrong_count"),
        (Fault(body="x" * (5 << 20)), "too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_query_that_spoils_a_post_fails_alone(
    retriever: FakeRetriever, sharing: Sharing, fault: Fault, cause: str
) -> None:
    held = await sharing.hold(retriever)
    tasks = sharing.start("a", "bad", "b")
    await asyncio.sleep(0)
    retriever.script = lambda query: fault if query == "bad" else None
    sharing.gate.set()
    a, bad, b = await asyncio.gather(*tasks)
    await held
    assert (a.error, bad.error, b.error) == ("", cause, "") and a.passages[0].id == "a#0" and b.passages[0].id == "b#0"
    assert retriever.posts[1:5] == [["a", "bad", "b"], ["a"], ["bad"], ["b"]]
    assert sharing.balancer.counts[f"search_faults_{cause}"] == retriever.posts.count(["bad"])
    assert sharing.search.outage == "", "one bad query is the query's fault"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"result": [[], [], []], "errors": [None, "index", None]}, "failed_index"),
        ({"result": [[], [{"document": {}}], []]}, "bad_shape"),
    ],
)
async def test_an_error_of_one_query_in_the_answer_is_that_query_s(
    retriever: FakeRetriever, sharing: Sharing, body: object, cause: str
) -> None:
    held = await sharing.hold(retriever)
    tasks = sharing.start("a", "bad", "b")
    await asyncio.sleep(0)
    retriever.script = lambda query: Fault(body=body) if query == "a" else Fault(400) if query == "bad" else None
    sharing.gate.set()
    results = await asyncio.gather(*tasks)
    await held
    assert [r.error for r in results] == ["", "failed_index" if cause == "failed_index" else "http_400", ""]
    assert sharing.balancer.counts[f"search_faults_{cause}"] == 1
    assert retriever.posts[1:] == [["a", "bad", "b"], *([["bad"]] if cause == "bad_shape" else [])]


async def test_a_cancelled_query_leaves_the_others_and_the_last_cancels_the_post(
    retriever: FakeRetriever, sharing: Sharing
) -> None:
    held = await sharing.hold(retriever)
    waiting, a, b, c = sharing.start("waiting", "a", "b", "c")
    await asyncio.sleep(0)
    waiting.cancel()
    retriever.script = lambda query: Fault(hang=True)
    sharing.gate.set()
    await eventually(lambda: retriever.posts[-1] == ["a", "b", "c"], "the others are in flight")
    await held
    a.cancel()
    await asyncio.gather(a, return_exceptions=True)
    assert a.cancelled() and retriever._in_flight == 1 and not b.done()
    retriever.script = lambda query: None
    b.cancel()
    c.cancel()
    await eventually(lambda: not retriever._in_flight, "the retriever has no request in flight")
    await own_passages(sharing.start("next"), ["next"])
    assert sharing.balancer.gauges()["searches_in_flight"]() == 0


async def test_each_query_of_a_post_has_its_own_timeout(retriever: FakeRetriever, sharing: Sharing) -> None:
    (batcher,) = sharing.batchers
    held = await sharing.hold(retriever)
    answer = asyncio.Event()
    retriever.script = lambda query: Fault(until=answer)
    queued = asyncio.create_task(batcher.search("queued", 0.01))
    with pytest.raises(SearchError, match="timeout"):
        await queued
    short, long = (asyncio.create_task(batcher.search(query, s)) for query, s in (("short", 0.4), ("long", 20.0)))
    sharing.gate.set()
    with pytest.raises(SearchError, match="timeout"):
        await short
    answer.set()
    assert [passage.id for passage in await long] == [f"long#{i}" for i in range(3)]
    assert retriever.posts[1:] == [["short", "long"]]
    await held


@pytest.mark.parametrize("fault", [Fault(cut=True), Fault(hang=True)], ids=["lost", "hangs"])
async def test_all_queries_of_a_lost_post_are_asked_again_elsewhere(fault: Fault) -> None:
    async with (
        FakeRetriever(backend="index") as sick,
        FakeRetriever(backend="index") as well,
        Sharing(sick, well, attempt_s=0.5, probe_s=5.0) as sharing,
    ):
        sick.script = lambda query: fault
        queries = [f"query {i}" for i in range(40)]
        await own_passages(sharing.start(*queries), queries)
        lost = sharing.balancer.counts["search_faults_timeout" if fault.hang else "search_faults_unreachable"]
        assert len(sick.posts[0]) == 20 == lost == sharing.balancer.counts["search_retries"]
        if fault.cut:
            assert sharing.balancer.counts["retriever_ejections"] == 0, "one lost POST is one failure"


def test_the_slots_hold_as_many_queries_as_may_be_in_flight() -> None:
    for topk in (1, 3, 100, MAX_TOPK):
        for ceiling in (1, 4, 512, 10_000):
            batcher = QueryBatcher(SearchTransport("search_r1", topk=topk), "http://a", ceiling=ceiling, attempt_s=1)
            assert batcher.max_posts >= MIN_POSTS and batcher.max_posts * batcher.max_queries >= ceiling
            assert 1 <= batcher.max_queries <= MAX_QUERIES and batcher.max_queries * topk <= MAX_HITS
