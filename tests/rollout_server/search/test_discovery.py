"""Retrievers that register in Redis, join, move and leave while searches run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from protocol.messages import MetricsSnapshot
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis import processes
from rollout_server.search.balancer import NONE
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from tests.rollout_server.conftest import World
from tests.support.fake_search import FakeRetriever, Fault
from tests.support.waiting import eventually

Register = Callable[..., Awaitable[None]]


@pytest.fixture
def register(world: World) -> Register:
    redis = world.client()

    async def write(name: str, url: str, state: str = "ready") -> None:
        await processes.write(redis, MetricsSnapshot(process="retriever", id=name, text={"url": url, "state": state}))

    return write


@pytest.fixture
def leave(world: World) -> Register:
    redis = world.client()
    return lambda name: processes.remove(redis, "retriever", name)


@asynccontextmanager
async def following(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpSearch]:
    monkeypatch.setattr(processes, "PERIOD_S", 0.02)
    search = HttpSearch(HttpSearchSettings(deadline_s=10, outage_wait_s=10))
    loop = asyncio.create_task(search.follow(world.client(), WaitTimer()))
    try:
        yield search
    finally:
        loop.cancel()
        await asyncio.wait([loop])
        assert loop.cancelled(), "no error ended it"
        await search.close()


@pytest.mark.usefixtures("short_pauses")
async def test_a_search_waits_for_the_first_retriever_and_follows_one_that_moves(
    world: World, register: Register, leave: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(world, monkeypatch) as search, FakeRetriever() as old, FakeRetriever() as new:
        assert search.outage == NONE
        early = asyncio.create_task(search("early"))
        await register("r1", old.url, "draining")
        await eventually(lambda: search.balancer.waiting == 0 and not early.done(), "it waits")
        await register("r1", old.url)
        assert (await early).passages[0].id == "early#0" and not search.outage
        await register("r1", new.url)
        await eventually(lambda: search.urls == [new.url], "the move is seen")
        assert (await search("late")).passages and new.queries == ["late"] and old.queries == ["early"]
        await leave("r1")
        await eventually(lambda: search.outage == NONE, "it has left")
        assert search.balancer.counts["search_outages"] == 1


@pytest.mark.usefixtures("short_pauses")
async def test_a_query_in_flight_at_a_retriever_that_leaves_is_answered_by_another(
    world: World, register: Register, leave: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(world, monkeypatch) as search, FakeRetriever(lambda query: Fault(hang=True)) as old:
        await register("r1", old.url)
        asked = asyncio.create_task(search("q"))
        await eventually(lambda: bool(old.asked), "the query has arrived")
        async with FakeRetriever() as new:
            await register("r2", new.url)
            await leave("r1")
            await eventually(lambda: search.urls == [new.url], "the change is seen")
            await old.stop()
            assert (await asked).passages and new.queries == ["q"]
            assert [replica.url for replica in search.balancer.replicas] == [new.url], "the other is not probed back in"


async def test_while_redis_is_away_the_last_retrievers_stay_in_use(
    own_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeRetriever() as retriever, following(own_world, monkeypatch) as search:
        snapshot = MetricsSnapshot(process="retriever", id="r", text={"url": retriever.url, "state": "ready"})
        await processes.write(own_world.client(), snapshot)
        await eventually(lambda: bool(search.urls), "it is found")
        own_world.process.kill()
        assert (await search("q")).passages


async def test_what_cannot_be_read_or_takes_no_requests_is_no_retriever(world: World, register: Register) -> None:
    redis = world.client()
    await register("garbage", "http://127.0.0.1:1")
    world.sync.set(world.keys.metrics("retriever", "garbage"), b"\x00\xff")
    await register("empty", "")
    await register("killed", "http://127.0.0.1:2")
    world.sync.zadd(world.keys.processes, {"retriever:killed": 1.0})
    await processes.write(redis, MetricsSnapshot(process="rollout", id="r", text={"url": "http://x", "state": "ready"}))
    assert await processes.ready_urls(redis, "retriever") == []
