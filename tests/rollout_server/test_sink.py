"""Publishing: once, whatever Redis and the network do meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import CorruptMessage
from protocol.keys import TASK_GROUP
from protocol.messages import GroupFailed
from rollout_server.dispatch import publisher as sink_module
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats
from tests.support.messages import make_group, make_task
from tests.support.waiting import eventually


async def leased(world, seq: int = 1) -> tuple[GroupPublisher, Stats, str]:
    """A sink, its stats, and the entry of a task leased by `me`."""
    redis, stats = world.client(), Stats("rollout", "me")
    world.issue(make_task(seq))
    ((entry, _),) = await redis.read(world.keys.tasks, TASK_GROUP, "me", 1)
    return GroupPublisher(redis, stats, consumer="me"), stats, entry.decode()


@pytest.mark.fault(32)
async def test_a_second_publish_of_the_same_task_changes_nothing(world) -> None:
    publisher, stats, entry = await leased(world)
    group = make_group(1, run=world.keys.run)
    assert await publisher.publish(entry, group) is True
    assert await publisher.publish(entry, group) is False
    assert len(world.published()) == 1
    assert (stats.counts["groups_published"], stats.counts["duplicates"]) == (1, 1)


async def test_a_retry_takes_the_place_of_the_failed_attempt(world) -> None:
    publisher, _, entry = await leased(world)
    assert await publisher.replace(entry, make_task(1, attempt=2)) is True
    assert await publisher.replace(entry, make_task(1, attempt=2)) is False
    assert world.pending() == 0
    ((_, fields),) = await world.client().read(world.keys.tasks, TASK_GROUP, "other", 5)
    assert fields[b"seq"] == b"1"


@pytest.mark.fault(3)
async def test_a_server_that_has_lost_its_lease_leaves_the_task_to_its_new_owner(world) -> None:
    publisher, stats, entry = await leased(world)
    world.sync.xclaim(world.keys.tasks, TASK_GROUP, "other", 0, [entry])
    failed = GroupFailed(run=world.keys.run, seq=1, attempt=3, reason="too_few_valid")
    assert await publisher.publish(entry, failed) is False
    assert await publisher.replace(entry, make_task(1, attempt=2)) is False
    corrupt = CorruptMessage("not msgpack")
    await publisher.dead_letter(entry, 1, b"x", corrupt, world.keys.run)
    await publisher.dead_letter(entry, None, b"x", corrupt, world.keys.run)
    assert world.published() == [] and world.pending() == 1 and world.sync.xlen(world.keys.tasks) == 1
    other = GroupPublisher(world.client(), Stats("rollout", "other"), consumer="other")
    assert await other.publish(entry, make_group(1, run=world.keys.run)) is True
    assert [m.seq for m in world.published()] == [1] and stats.counts["groups_failed"] == 0


@pytest.mark.fault(3)
async def test_a_finished_group_counts_although_its_lease_was_lost(world) -> None:
    publisher, _, entry = await leased(world)
    world.sync.xclaim(world.keys.tasks, TASK_GROUP, "other", 0, [entry])
    assert await publisher.publish(entry, make_group(1, run=world.keys.run)) is True
    assert world.pending() == 0


@pytest.mark.fault(23)
async def test_publishing_outlasts_a_redis_that_is_killed(own_world) -> None:
    world = own_world
    publisher, stats, entry = await leased(world)
    world.process.kill()
    publishing = asyncio.create_task(publisher.publish(entry, make_group(1, run=world.keys.run)))
    await eventually(lambda: stats.waits.seconds().get("redis", 0) > 0.3, "the sink waits for Redis")
    await asyncio.to_thread(world.process.start)
    assert await asyncio.wait_for(publishing, 15) is True
    assert [m.seq for m in world.published()] == [1] and world.pending() == 0


@pytest.mark.fault(25)
async def test_publishing_waits_while_redis_is_full(own_world) -> None:
    world = own_world
    publisher, stats, entry = await leased(world)
    world.sync.config_set("maxmemory", "1")
    publishing = asyncio.create_task(publisher.publish(entry, make_group(1, run=world.keys.run)))
    await eventually(lambda: stats.waits.seconds().get("redis", 0) > 0.3, "the sink waits for room")
    assert world.pending() == 1, "a publish that is refused acknowledges nothing"
    world.sync.config_set("maxmemory", "0")
    assert await asyncio.wait_for(publishing, 15) is True


@pytest.mark.fault(24)
async def test_publishing_waits_for_a_wiped_redis_and_then_gives_way(own_world) -> None:
    """After a wipe the task is gone: its group is dropped, and the learner issues the seq again."""
    world = own_world
    publisher, stats, entry = await leased(world)
    world.sync.flushall()
    world.sync.function_flush()
    publishing = asyncio.create_task(publisher.publish(entry, make_group(1, run=world.keys.run)))
    await eventually(lambda: stats.waits.seconds().get("redis", 0) > 0.2, "the sink waits for the learner")
    world.create()
    assert await asyncio.wait_for(publishing, 15) is False
    assert world.published() == []


@pytest.mark.fault(34)
async def test_a_group_beyond_the_size_limit_is_reported_as_failed(world, monkeypatch: pytest.MonkeyPatch) -> None:
    from protocol import codec

    publisher, _, entry = await leased(world)
    monkeypatch.setitem(codec.LIMITS, "group", 4096)
    await publisher.publish(entry, make_group(1, run=world.keys.run, length=2000))
    (message,) = world.published()
    assert isinstance(message, GroupFailed) and message.reason == "too_large"
    assert message.generated_tokens == 4 * (2 + 2000)


async def test_dead_letters_keep_a_bounded_piece_of_the_evidence(world, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _, entry = await leased(world)
    monkeypatch.setattr(sink_module, "DLQ_BYTES", 10)
    await publisher.dead_letter(entry, 1, b"x" * 1000, CorruptMessage("not msgpack"), world.keys.run)
    ((_, fields),) = world.sync.xrange(world.keys.dlq)
    assert fields == {
        **{b"id": entry.encode(), b"seq": b"1", b"reason": b"task_corrupt", b"detail": b"not msgpack"},
        **{b"from": b"me", b"h": b"", b"b": b"x" * 10},
    }
    assert len(world.published()) == 1
