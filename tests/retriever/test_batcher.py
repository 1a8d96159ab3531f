"""Batching, joining, bounds and cancellation, over real search in a real owner thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from retriever.backends.base import QueryFailure, QueryResult
from retriever.metrics import Metrics
from retriever.serving.admission import Overloaded, QueueLimit
from retriever.serving.batcher import ServiceStopped
from retriever.serving.service import EMPTY, normalise
from tests.support.waiting import eventually

Bench = Any
StartBench = Callable[..., AbstractAsyncContextManager[Bench]]


def ids(answer: QueryResult) -> list[str]:
    return [json.loads(document)["id"] for document in answer.documents]


async def test_concurrent_requests_share_index_calls(bench: StartBench) -> None:
    async with bench(window_ms=50) as b:
        answers = await asyncio.gather(*(b.searches.search([f"number{i}"], 1) for i in range(30)))
        assert [ids(answer[0]) for answer in answers] == [[f"d{i}"] for i in range(30)]
        assert len(b.watched.calls) == b.count("index_calls_total") == 1
        assert b.count("searched_total") == 30


async def test_a_batch_is_searched_before_the_window_ends_when_it_is_full(bench: StartBench) -> None:
    async with bench(window_ms=1000, max_batch=4) as b, asyncio.timeout(0.9):
        await asyncio.gather(*(b.searches.search([f"number{i}"], 1) for i in range(8)))
        assert [len(queries) for queries, _ in b.watched.calls] == [4, 4]


async def test_clients_that_ask_again_at_once_stay_in_one_batch(bench: StartBench) -> None:
    async with bench(window_ms=0, cache_mb=0) as b:
        b.watched.gate.clear()

        async def client(name: int) -> None:
            for turn in range(2):
                await b.searches.search([f"number{2 * name + turn}"], 1)
                await asyncio.sleep(0.002)  # the way to the client and back

        early = asyncio.create_task(client(0))
        await eventually(lambda: b.watched.entered == 1, "the first query is being searched")
        late = asyncio.create_task(client(1))
        await asyncio.sleep(0.4)  # a tenth of a call of this length is waited for those that it answers
        b.watched.gate.set()
        await asyncio.gather(early, late)
        assert [queries for queries, _ in b.watched.calls][:2] == [["number0"], ["number2", "number1"]]


async def test_equal_queries_are_searched_once(bench: StartBench) -> None:
    async with bench(window_ms=20) as b:
        answers = await asyncio.gather(*(b.searches.search(["number7", " number7\n", "number7"], 2) for _ in range(10)))
        assert len({tuple(ids(answer)) for group in answers for answer in group}) == 1
        assert b.watched.calls == [(["number7"], 2)]
        assert b.count("deduplicated_total") == 29


async def test_a_query_joins_an_equal_one_that_is_being_searched(bench: StartBench) -> None:
    async with bench(window_ms=0) as b:
        b.watched.gate.clear()
        first = asyncio.create_task(b.searches.search(["number7"], 1))
        await eventually(lambda: b.watched.entered == 1, "the first query is being searched")
        second = asyncio.create_task(b.searches.search(["number7"], 1))
        await asyncio.sleep(0)
        b.watched.gate.set()
        assert await first == await second
        assert len(b.watched.calls) == 1


async def test_different_numbers_of_hits_in_one_batch_are_each_right(bench: StartBench) -> None:
    async with bench(window_ms=20) as b:
        ks = [1, 5, 3, 5, 40, 1000]
        answers = await asyncio.gather(*(b.searches.search(["Curie wrote"], k) for k in ks))
        assert [len(answer[0].documents) for answer in answers] == [1, 5, 3, 5, 40, 40]
        longest = ids(answers[-1][0])
        assert all(ids(answer[0]) == longest[: min(k, 40)] for answer, k in zip(answers, ks, strict=True))


async def test_cached_answers_equal_fresh_ones_and_reach_no_index(bench: StartBench) -> None:
    async with bench() as b:
        fresh = await b.searches.search(["Curie", "東京"], 3)
        calls = len(b.watched.calls)
        assert await b.searches.search(["  Curie ", "東京"], 3) == fresh
        assert len(b.watched.calls) == calls
        assert b.count("cache_hits_total") == 2


async def test_without_a_cache_every_request_is_searched_again(bench: StartBench) -> None:
    async with bench(cache_mb=0, window_ms=0) as b:
        assert await b.searches.search(["Curie"], 3) == await b.searches.search(["Curie"], 3)
        assert len(b.watched.calls) == 2


async def test_blank_queries_have_no_hits_and_reach_no_index(bench: StartBench) -> None:
    async with bench() as b:
        assert await b.searches.search(["", " \n\t", "\u3000"], 3) == [EMPTY] * 3
        assert await b.searches.search([], 3) == []
        assert b.watched.calls == []


async def test_a_full_queue_refuses_a_request_whole_and_recovers(bench: StartBench) -> None:
    async with bench(window_ms=0, queue_limit=4, max_batch=1) as b:
        b.watched.gate.clear()
        held = asyncio.create_task(b.searches.search(["number1", "number2", "number3"], 1))
        await eventually(lambda: b.count("queue") == 3, "three queries are queued")
        with pytest.raises(Overloaded):
            await b.searches.search(["number4", "number5"], 1)
        assert b.count("queue") == 3
        joined = asyncio.create_task(b.searches.search(["number1", "number3"], 1))  # needs no room
        b.watched.gate.set()
        assert [ids(answer) for answer in await joined] == [["d1"], ["d3"]]
        await held
        assert ids((await b.searches.search(["number4"], 1))[0]) == ["d4"]


async def test_an_idle_service_takes_a_request_larger_than_the_queue(bench: StartBench) -> None:
    async with bench(queue_limit=2, max_batch=3) as b:
        answers = await b.searches.search([f"number{i}" for i in range(20)], 1)
        assert [ids(answer) for answer in answers] == [[f"d{i}"] for i in range(20)]


async def test_cancelled_queries_are_dropped_unless_another_request_wants_them(bench: StartBench) -> None:
    async with bench(window_ms=0) as b:
        b.watched.gate.clear()
        first = asyncio.create_task(b.searches.search(["number0"], 1))
        await eventually(lambda: b.watched.entered == 1, "the owner is busy")
        gone = asyncio.create_task(b.searches.search(["number1", "number2"], 1))
        stays = asyncio.create_task(b.searches.search(["number2", "number3"], 1))
        await eventually(lambda: b.count("queue") == 4, "all are queued")
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert b.count("queue") == 3
        b.watched.gate.set()
        assert [ids(answer) for answer in await stays] == [["d2"], ["d3"]]
        await first
        assert [queries for queries, _ in b.watched.calls] == [["number0"], ["number2", "number3"]]
        assert b.count("dropped_total") == 1


async def test_a_failing_query_fails_alone(bench: StartBench) -> None:
    async with bench(window_ms=20) as b:
        b.watched.poison = "number3"
        results = await asyncio.gather(*(b.searches.search([f"number{i}"], 1) for i in range(6)))
        assert results[3] == [QueryFailure("index", "ValueError: poisoned")]
        assert [ids(result[0]) for i, result in enumerate(results) if i != 3] == [[f"d{i}"] for i in (0, 1, 2, 4, 5)]
        assert b.count("failed_total", cause="index") == 1
        b.watched.poison = "none"
        assert ids((await b.searches.search(["number3"], 1))[0]) == ["d3"]


async def test_the_end_of_the_loop_fails_what_waits_and_what_comes_after(bench: StartBench) -> None:
    async with bench(window_ms=0) as b:
        b.watched.gate.clear()
        flying = asyncio.create_task(b.searches.search(["number0"], 1))
        await eventually(lambda: b.watched.entered == 1, "one query is being searched")
        waiting = asyncio.create_task(b.searches.search(["number1"], 1))
        await eventually(lambda: b.count("queue") == 2, "another waits")
        (loop,) = [task for task in asyncio.all_tasks() if "QueryService.run" in repr(task.get_coro())]
        loop.cancel()
        for task in (flying, waiting):
            with pytest.raises(ServiceStopped):
                await task
        with pytest.raises(ServiceStopped):
            await b.searches.search(["number2"], 1)


def test_normalising_joins_spellings_that_look_alike_and_keeps_case() -> None:
    assert normalise("  E\u0301mile \n wrote ") == normalise("\u00c9mile wrote") == "\u00c9mile wrote"


async def test_with_patience_a_request_waits_for_its_turn(bench: StartBench) -> None:
    async with bench(window_ms=0, queue_limit=4, max_batch=4, overload="wait", overload_wait_s=60) as b:
        b.watched.gate.clear()
        held = asyncio.create_task(b.searches.search(["number1", "number2", "number3"], 1))
        await eventually(lambda: b.count("queue") == 3, "three queries are queued")
        large = asyncio.create_task(b.searches.search([f"number{i}" for i in range(10, 20)], 1))
        await eventually(lambda: b.count("waited_total") == 1, "a request too large for the room waits")
        small = asyncio.create_task(b.searches.search(["number4"], 1))
        await eventually(lambda: b.count("waited_total") == 2, "a later one does not overtake it")
        gone = asyncio.create_task(b.searches.search(["number5"], 1))
        await eventually(lambda: b.count("waited_total") == 3, "a third waits")
        gone.cancel()
        joined = asyncio.create_task(b.searches.search(["number1"], 1))  # needs no room
        b.watched.gate.set()
        assert [ids(answer) for answer in await held] == [["d1"], ["d2"], ["d3"]]
        assert ids((await joined)[0]) == ["d1"]
        assert [ids(answer) for answer in await large] == [[f"d{i}"] for i in range(10, 20)]
        assert ids((await small)[0]) == ["d4"]
        assert b.count("queue") == 0
        assert not any("number5" in queries for queries, _ in b.watched.calls)


async def test_patience_ends_and_leaves_the_places_to_others(bench: StartBench) -> None:
    async with bench(window_ms=0, queue_limit=2, max_batch=2, overload="wait", overload_wait_s=0.05) as b:
        b.watched.gate.clear()
        held = asyncio.create_task(b.searches.search(["number1", "number2"], 1))
        await eventually(lambda: b.count("queue") == 2, "the queue is full")
        with pytest.raises(Overloaded, match=r"after 0\.05 s") as raised:
            await b.searches.search(["number3"], 1)
        assert raised.value.status == 503
        b.watched.gate.set()
        await held
        assert b.count("queue") == 0
        assert ids((await b.searches.search(["number3", "number4"], 1))[0]) == ["d3"]


async def test_places_that_come_with_a_cancellation_are_given_back() -> None:
    queue_limit = QueueLimit(1, Metrics(), max_wait_s=60)
    assert queue_limit.try_acquire(1)
    waiting = asyncio.create_task(queue_limit.acquire(1))
    await asyncio.sleep(0)
    queue_limit.release(1)  # the place is the waiting request's now
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue_limit.try_acquire(1)
