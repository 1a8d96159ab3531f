"""Redis unavailable or full: a bounded number of groups is finished, kept, and published later."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.keys import TASK_GROUP
from protocol.messages import TrajectoryGroup
from protocol.runtime.redis import aio as redis_client
from protocol.runtime.redis import client as redis_connections
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.versions import PolicyVersion
from rollout_server.dispatch.leases import LeasePool
from rollout_server.dispatch.publisher import PARALLEL, GroupPublisher
from rollout_server.metrics import Stats
from tests.support import rollout_process
from tests.support.messages import make_group, make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)


class Partition:
    """A proxy to Redis that can be cut: connections stay open and data is dropped. A connection that has lost data
    carries nothing more; its user must close it.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._whole = True
        self._links: set[asyncio.Task[None]] = set()
        self.dropped = 0
        """Bytes that were dropped."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def stop(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        self._whole = False

    def restore(self) -> None:
        self._whole = True

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._links.add(me)
        try:
            there, back = await asyncio.open_unix_connection(self._socket)
            ways = [asyncio.create_task(self._carry(*way)) for way in ((reader, back), (there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                back.close()
        except asyncio.CancelledError:
            pass  # the wire is taken down
        finally:
            writer.close()
            self._links.discard(me)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = False
        while data := await reader.read(1 << 16):
            broken = broken or not self._whole
            if broken:
                self.dropped += len(data)
            else:
                writer.write(data)
                await writer.drain()


@pytest.fixture
async def wire(world) -> AsyncIterator[Partition]:
    wire = Partition(Path(world.url.removeprefix("unix://")))
    await wire.start()
    yield wire
    await wire.stop()


async def values(url: str) -> dict[str, Any]:
    """What the server says of itself, by HTTP: Redis may be away."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        told = await response.json()
    return told["values"] | {f"waits_{cause}": seconds for cause, seconds in told["waits"].items()}


async def reaches(url: str, name: str, least: float, seconds: float = 20.0) -> dict[str, Any]:
    """All values, as soon as the one called `name` is at `least`."""
    deadline = time.monotonic() + seconds
    while True:
        told = await values(url)
        if told[name] >= least:
            return told
        assert time.monotonic() < deadline, f"{name} is {told[name]}, not {least}, after {seconds} s"
        await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.fault(4, 32)
async def test_behind_a_partition_groups_are_finished_kept_and_published_or_given_way(
    world, wire: Partition, model: Path, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "COMMAND_S", 0.3)
    world.target(V5)
    async with (
        rollout_process.talker(tokens, latency_s=0.4) as engine,
        rollout_process.server(world, model, url=wire.url, name="far", task_idle_ms=900) as (far, _),
    ):
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in (1, 2, 3)))
        await eventually(lambda: len(engine.requests) >= 6, "three groups are under way")
        wire.cut()
        told = await reaches(far, "spooled_groups", 3)
        assert wire.dropped and told["spooled_bytes"] > 0 and world.published() == []
        world.issue(make_task(4, group_size=2))
        await asyncio.sleep(0.3)
        assert world.pending() == 3, "nothing more is leased"
        wire.restore()
        await eventually(
            lambda: len(world.published()) == 4, "all are published on return, and work is taken again", 20
        )
        told = await values(far)
        assert (told["duplicates"], told["spooled_groups"]) == (0, 0) and told["waits_redis"] > 0.3

        requests = len(engine.requests)
        world.issue(*(make_task(seq, group_size=2) for seq in (5, 6)))
        await eventually(lambda: len(engine.requests) >= requests + 4, "two more are under way")
        wire.cut()
        await reaches(far, "spooled_groups", 2)
        async with rollout_process.server(world, model, name="near", task_idle_ms=900) as (near, _):
            await eventually(lambda: len(world.published()) == 6, "another server took over what fell silent", 20)
            assert (await values(near))["reclaimed"] == 2
        wire.restore()
        await reaches(far, "duplicates", 2)
    groups = world.published()
    assert Counter(g.seq for g in groups) == Counter(range(1, 7)), "nothing is lost, nothing is there twice"
    assert [g.producer for g in groups][4:] == ["near", "near"] and world.pending() == 0
    assert all(isinstance(g, TrajectoryGroup) for g in groups)


@pytest.mark.parametrize(("spool", "most"), [(2, 3), (32, 6)], ids=["bounded", "control"])
@pytest.mark.fault(25, 48)
async def test_a_full_redis_is_given_a_bounded_number_of_groups_to_wait_for(
    own_world, model: Path, tokens, spool: int, most: int
) -> None:
    """Reading tasks still works then, so that only the spool says when to stop."""
    world = own_world
    world.target(V5)
    async with rollout_process.talker(tokens) as engine:
        world.register("e", engine.url, V5)
        world.issue(*(make_task(seq, group_size=2) for seq in range(1, 7)))
        world.sync.config_set("maxmemory", "1")
        async with rollout_process.server(world, model, concurrency_groups=1, spool_groups=spool) as (url, _):
            await eventually(lambda: world.pending() >= min(most, spool), "tasks are taken")
            await reaches(url, "spooled_groups", min(most, spool))
            await asyncio.sleep(0.4)
            told = await values(url)
            assert told["spooled_groups"] == world.pending() and told["waits_redis"] > 0.3
            assert (world.pending() <= most) and world.published() == []
            assert (world.pending() == 6) == (spool == 32), "without the bound it takes everything"
            world.sync.config_set("maxmemory", "0")
            await eventually(lambda: len(world.published()) == 6, "there is room again", 20)
            assert (await values(url))["spooled_groups"] == 0
    assert sorted(g.seq for g in world.published()) == list(range(1, 7)) and world.pending() == 0


async def test_a_task_that_waits_to_be_put_back_is_in_the_spool_too(own_world) -> None:
    world = own_world
    redis, stats = world.client(), Stats("rollout", "me")
    publisher = GroupPublisher(redis, stats, spool_groups=1)
    world.issue(make_task(1))
    ((entry, _),) = await redis.read(world.keys.tasks, TASK_GROUP, "me", 1)
    world.sync.config_set("maxmemory", "1")
    replacing = asyncio.create_task(publisher.replace(entry.decode(), make_task(1, attempt=2)))
    await eventually(lambda: stats.waits.seconds().get("redis", 0) > 0.1, "it waits for Redis")
    assert publisher.spool_full
    world.sync.config_set("maxmemory", "0")
    assert await asyncio.wait_for(replacing, 15) is True and not publisher.spool_full


async def test_the_spool_is_bounded_in_bytes_too(own_world) -> None:
    world = own_world
    redis, stats = world.client(), Stats("rollout", "me")
    group = make_group(1, run=world.keys.run, length=1000)
    publisher = GroupPublisher(redis, stats, spool_groups=100, spool_bytes=30_000)
    world.issue(make_task(1))
    ((entry, _),) = await redis.read(world.keys.tasks, TASK_GROUP, "me", 1)
    assert not publisher.spool_full
    world.sync.config_set("maxmemory", "1")
    publishing = asyncio.create_task(publisher.publish(entry.decode(), group))
    await eventually(lambda: stats.values()["spool_age_s"] > 0.1, "it waits for Redis")
    assert publisher.spool_full and stats.values()["spooled_bytes"] > 4 * 1000 * 8 - 1000
    world.sync.config_set("maxmemory", "0")
    assert await asyncio.wait_for(publishing, 15) is True
    assert not publisher.spool_full and stats.values()["spool_age_s"] == 0


async def test_300_groups_are_published_at_once_and_no_lease_waits_for_them(world, monkeypatch: Any) -> None:
    redis, stats = world.client(), Stats("rollout", "me")
    publisher = GroupPublisher(redis, stats, consumer="me", spool_groups=1000)
    leases = LeasePool(redis, publisher, stats, consumer="me", concurrency=300, idle_ms=60_000)
    world.issue(*(make_task(seq) for seq in range(1, 301)))
    entries = [entry.decode() for entry, _ in await redis.read(world.keys.tasks, TASK_GROUP, "me", 300)]
    leases.in_flight = dict.fromkeys(entries, (None, None))
    most, call = 0, redis.call

    async def counted(name: str, *args: Any, **more: Any) -> Any:
        nonlocal most
        most = max(most, int((await asyncio.to_thread(world.sync.info, "clients"))["connected_clients"]))
        return await call(name, *args, **more)

    before = int(world.sync.info("clients")["connected_clients"])
    monkeypatch.setattr(redis, "call", counted)
    group = make_group(1, run=world.keys.run)
    publishing = [
        asyncio.create_task(publisher.publish(entry, group.model_copy(update={"seq": seq})))
        for seq, entry in enumerate(entries, 1)
    ]
    while not all(task.done() for task in publishing):
        await leases._renew()
    assert all(await asyncio.gather(*publishing)) and world.pending() == 0
    assert "redis" not in stats.waits.seconds(), "Redis was never away"
    assert most - before <= PARALLEL + 10


async def test_a_lease_is_renewed_while_every_other_connection_is_busy(world, monkeypatch: Any) -> None:
    monkeypatch.setattr(redis_connections, "CONNECTIONS", 1)
    redis, stats = world.client(), Stats("rollout", "me")
    leases = LeasePool(redis, GroupPublisher(redis, stats), stats, consumer="me", concurrency=1, idle_ms=60_000)
    world.issue(make_task(1))
    ((entry, _),) = await redis.read(world.keys.tasks, TASK_GROUP, "me", 1)
    leases.in_flight = {entry.decode(): (None, None)}
    async with redis.commands() as commands:
        busy = asyncio.create_task(commands.xread({world.keys.events: "$"}, block=0))
    await eventually(lambda: int(world.sync.info("clients")["blocked_clients"]) > 0, "its only connection is busy")
    with pytest.raises(RedisUnavailable):
        await redis.now()
    world.sync.xclaim(world.keys.tasks, TASK_GROUP, "me", 0, [entry], idle=50_000)
    await leases._renew()
    (pending,) = world.sync.xpending_range(world.keys.tasks, TASK_GROUP, "-", "+", 1)
    assert pending["time_since_delivered"] < 50_000
    busy.cancel()
