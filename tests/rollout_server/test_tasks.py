"""Leases: ownership of tasks, and what happens when a server dies, stops, or cannot read a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.codec import encode
from protocol.messages import GroupFailed
from protocol.runtime.metrics import WaitTimer
from protocol.versions import PolicyVersion
from rollout_server.dispatch import leases as tasks_module
from rollout_server.dispatch.fleet import Fleet, FleetTable
from rollout_server.dispatch.leases import LeasePool, TaskLease
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.dispatch.runner import TaskRunner
from rollout_server.metrics import Stats
from tests.support.messages import make_group, make_task
from tests.support.waiting import eventually

IDLE_MS = 400


class Server:
    """The leasing half of a rollout server; `perform` publishes when `let` is set."""

    def __init__(self, world, name: str, *, concurrency: int = 8, idle_ms: int = IDLE_MS) -> None:
        self.stats = Stats("rollout", name)
        self.redis = world.client()
        self.run = world.keys.run
        self.publisher = GroupPublisher(self.redis, self.stats, consumer=name)
        self.backpressure = ""
        self.tasks = LeasePool(
            self.redis,
            self.publisher,
            self.stats,
            consumer=name,
            concurrency=concurrency,
            idle_ms=idle_ms,
            backpressure=lambda: self.backpressure,
        )
        self.let = asyncio.Event()
        self.quick: set[int] = set()
        self.begun: list[int] = []
        self.cancelled: list[int] = []

    async def perform(self, lease: TaskLease) -> None:
        self.begun.append(lease.task.seq)
        try:
            await (asyncio.sleep(0.2) if lease.task.seq in self.quick else self.let.wait())
        except asyncio.CancelledError:
            self.cancelled.append(lease.task.seq)
            raise
        self.tasks.finished(lease)
        await self.publisher.publish(lease.entry, make_group(lease.task.seq, run=self.run))

    @asynccontextmanager
    async def running(self, *, beating: bool = True) -> AsyncIterator[None]:
        """Leases (and beats) for the time of the block; leaving it is a sudden death."""
        async with asyncio.TaskGroup() as tasks:
            self.leasing = tasks.create_task(self.tasks.lease_loop(tasks, self.perform))
            loops = [self.leasing]
            if beating:
                loops.append(tasks.create_task(self.tasks.renew_loop()))
            yield
            for task in [*loops, *(task for _, task in self.tasks.in_flight.values())]:
                task.cancel()


@pytest.mark.fault(48)
async def test_no_more_tasks_are_leased_than_there_are_places(world) -> None:
    server = Server(world, "a", concurrency=2)
    world.issue(*(make_task(seq) for seq in range(1, 6)))
    async with server.running():
        await eventually(lambda: server.begun == [1, 2], "two begin")
        await asyncio.sleep(0.2)
        assert server.begun == [1, 2] and world.pending() == 2, "the others wait where every server can see them"
        server.let.set()
        await eventually(lambda: len(world.published()) == 5, "all are published")
    assert [m.seq for m in world.published()] == [1, 2, 3, 4, 5] and world.pending() == 0


@pytest.mark.parametrize("cause", ["backlog", "retriever"])
async def test_a_server_whose_turns_would_only_wait_leaves_tasks_to_the_others(world, cause: str) -> None:
    server = Server(world, "a")
    server.backpressure = cause
    async with server.running():
        world.issue(make_task(1))
        await asyncio.sleep(0.3)
        assert server.begun == [] and world.pending() == 0
        assert server.stats.waits.seconds()[cause] > 0.2
        server.backpressure = ""
        await eventually(lambda: server.begun == [1], "it goes on when they have caught up", 1.0)
        server.backpressure = cause
        server.tasks.stop()
        await eventually(server.leasing.done, "a stop does not wait for them", 1.0)


@pytest.mark.fault(1)
async def test_a_dead_servers_tasks_are_taken_over(world) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    world.issue(*(make_task(seq) for seq in (1, 2, 3)))
    async with first.running():
        await eventually(lambda: len(first.begun) == 3, "the first server has all")
    second.let.set()
    async with second.running():
        await eventually(lambda: len(world.published()) == 3, "the second server publishes them")
    assert sorted(m.seq for m in world.published()) == [1, 2, 3]
    assert second.stats.counts["reclaimed"] == 3 and world.pending() == 0


@pytest.mark.fault(1)
@pytest.mark.parametrize("busy", [40, 2000])
async def test_a_dead_servers_task_is_found_in_one_look_behind_any_number_of_leases(world, busy: int) -> None:
    *_, last = world.issue(*(make_task(seq) for seq in range(1, busy + 2)))
    world.sync.xreadgroup("rollout", "busy", {world.keys.tasks: ">"}, count=busy + 1)
    world.sync.xclaim(world.keys.tasks, "rollout", "dead", 0, [last], idle=90_000)
    server = Server(world, "a", concurrency=1, idle_ms=60_000)
    ((entry, fields, deliveries),) = await server.tasks._reclaim()
    assert (entry, fields[b"seq"], deliveries) == (last, b"%d" % (busy + 1), 3)
    assert server.stats.counts["reclaimed"] == 1


@pytest.mark.fault(32)
async def test_tasks_delivered_in_a_lost_reply_are_begun_and_no_step_nearer_to_poison(world) -> None:
    server = Server(world, "a", concurrency=2, idle_ms=60_000)
    world.issue(*(make_task(seq) for seq in (1, 2, 3)))
    # what Redis has delivered to `a` and `a` has not heard of: by a read, and by a claim
    world.sync.xreadgroup("rollout", "a", {world.keys.tasks: ">"}, count=1)
    ((_, ((second, _),)),) = world.sync.xreadgroup("rollout", "b", {world.keys.tasks: ">"}, count=1)
    world.sync.xclaim(world.keys.tasks, "rollout", "a", 0, [second], retrycount=3)
    async with server.running():
        await eventually(lambda: server.begun == [1, 2], "both are begun, and not a third")
        delivered = world.sync.xpending_range(world.keys.tasks, "rollout", "-", "+", 9)
        assert [one["times_delivered"] for one in delivered] == [1, 3]
        server.let.set()
        await eventually(lambda: len(world.published()) == 3, "all are published")
    assert server.begun == [1, 2, 3] and server.stats.counts["reclaimed"] == 0


@pytest.mark.fault(32)
async def test_what_was_delivered_to_a_connection_that_broke_is_begun_at_once(world) -> None:
    server = Server(world, "a", idle_ms=60_000)
    async with server.running():
        await eventually(lambda: server.tasks._next_reclaim > 0, "the first look found nothing")
        await eventually(lambda: blocked(world), "it waits for tasks")
        with world.sync.pipeline() as pipe:  # atomic: the task is delivered, and the reply is lost
            for number in blocked(world):
                pipe.client_kill_filter(_id=number)
            pipe.xadd(world.keys.tasks, {"seq": 1, "b": encode(make_task(1))})
            pipe.xreadgroup("rollout", "a", {world.keys.tasks: ">"}, count=1)
            pipe.execute()
        await eventually(lambda: server.begun == [1], "it is begun", 5.0)


async def test_a_lost_task_is_found_behind_those_in_flight(world) -> None:
    server = Server(world, "a", concurrency=2)
    world.issue(make_task(1))
    async with server.running():
        await eventually(lambda: server.begun == [1], "it is begun")
        with world.sync.pipeline() as pipe:  # atomic: no blocked read of `a` gets it
            pipe.xadd(world.keys.tasks, {"seq": 2, "b": encode(make_task(2))})
            pipe.xreadgroup("rollout", "a", {world.keys.tasks: ">"}, count=1)
            pipe.execute()
        await eventually(lambda: server.begun == [1, 2], "the second is begun", 5.0)


def blocked(world) -> list[str]:
    """Ids of the connections that wait for tasks."""
    return [one["id"] for one in world.sync.client_list() if one["cmd"] == "xreadgroup" and "b" in one["flags"]]


async def test_a_beating_server_keeps_its_tasks(world) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    world.issue(make_task(1))
    async with first.running():
        await eventually(lambda: first.begun == [1], "the first server has it")
        async with second.running():
            await asyncio.sleep(3 * IDLE_MS / 1000)
            assert second.begun == []
        first.let.set()
        await eventually(lambda: len(world.published()) == 1, "it is published")
    assert first.cancelled == []


@pytest.mark.fault(23, 27)
async def test_a_task_that_a_rolled_back_redis_hands_out_again_is_not_begun_twice(world) -> None:
    server = Server(world, "a", idle_ms=60_000)
    world.issue(make_task(1))
    async with server.running():
        await eventually(lambda: server.begun == [1], "it is begun")
        # what a Redis that lost its last second looks like: the entry is there, its delivery never happened
        world.sync.xgroup_setid(world.keys.tasks, "rollout", "0")
        world.issue(make_task(2))
        await eventually(lambda: 2 in server.begun, "what is new is begun")
        server.let.set()
        await eventually(lambda: len(world.published()) == 2 and not server.tasks.in_flight, "both are published")
    assert server.begun == [1, 2] and world.pending() == 0


@pytest.mark.fault(3)
async def test_work_on_a_lost_lease_is_cancelled(world) -> None:
    slow, quick = Server(world, "a"), Server(world, "b")
    world.issue(make_task(1))
    async with slow.running(beating=False):
        await eventually(lambda: slow.begun == [1], "the slow server has it")
        slow.leasing.cancel()  # it neither beats nor looks for silent servers: it hangs
        quick.let.set()
        async with quick.running():
            await eventually(lambda: len(world.published()) == 1, "the quick one took it over")
        await slow.tasks._renew()
        await eventually(lambda: slow.cancelled == [1], "the slow one learns of it")
    assert slow.stats.counts["leases_lost"] == 1 and len(world.published()) == 1
    ((_, event),) = world.sync.xrange(world.keys.events)
    assert (event[b"kind"], event[b"id"]) == (b"lease-lost", b"a") and b"seq 1" in event[b"text"]


@pytest.mark.fault(35)
async def test_a_task_that_outlives_three_servers_is_given_up_as_poison(world) -> None:
    world.issue(make_task(7))
    for name in ("a", "b", "c"):
        victim = Server(world, name, idle_ms=60)
        async with victim.running(beating=False):
            await eventually(lambda victim=victim: victim.begun == [7], f"{name} begins")
    last = Server(world, "d", idle_ms=60)
    async with last.running():
        await eventually(world.published, "the fourth gives it up")
    (message,) = world.published()
    assert isinstance(message, GroupFailed) and (message.seq, message.reason) == (7, "poison")
    assert last.begun == [] and world.pending() == 0
    ((_, letter),) = world.sync.xrange(world.keys.dlq)
    assert (letter[b"seq"], letter[b"reason"], letter[b"from"]) == (b"7", b"task_poison", b"d")
    assert letter[b"b"] == encode(make_task(7)) and b"delivered 4 times" in letter[b"detail"]
    ((_, event),) = world.sync.xrange(world.keys.events)
    assert (event[b"kind"], event[b"id"]) == (b"poison", b"d")


@pytest.mark.fault(30)
async def test_an_unreadable_task_becomes_a_dead_letter_and_the_others_go_on(world) -> None:
    server = Server(world, "a")
    server.let.set()
    world.sync.xadd(world.keys.tasks, {"seq": 1, "b": b"\xc1 not msgpack"})
    world.sync.xadd(world.keys.tasks, {"nothing": "of ours"})
    world.sync.xadd(world.keys.tasks, {"seq": b"9" * 5000, "b": b""})
    world.issue(make_task(3))
    async with server.running():
        await eventually(lambda: len(world.published()) == 2, "one reported, one published")
        await eventually(lambda: world.pending() == 0, "none is left")
    failed, group = world.published()
    assert isinstance(failed, GroupFailed) and (failed.seq, failed.reason) == (1, "task_corrupt")
    assert group.seq == 3
    letters = [fields for _, fields in world.sync.xrange(world.keys.dlq)]
    assert [(f[b"seq"], f[b"b"]) for f in letters] == [(b"1", b"\xc1 not msgpack"), (b"0", b""), (b"0", b"")]


@pytest.mark.fault(2)
async def test_a_drain_lets_quick_groups_finish_and_releases_slow_ones_at_once(world) -> None:
    server, other = Server(world, "a", idle_ms=60_000), Server(world, "b", idle_ms=60_000)
    server.quick = {1}
    world.issue(make_task(1), make_task(2))
    async with server.running():
        await eventually(lambda: len(server.begun) == 2, "both begin")
        server.tasks.stop()
        await asyncio.wait_for(server.leasing, 3.0)
        await server.tasks.drain(0.3, asyncio.Event())
        assert server.cancelled == [2] and [m.seq for m in world.published()] == [1]
    other.let.set()
    async with other.running():
        await eventually(lambda: len(world.published()) == 2, "the other server has the second at once", 5.0)
    assert [m.seq for m in world.published()] == [1, 2] and other.stats.counts["reclaimed"] == 0


async def test_a_drain_without_engines_ends_early(world, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "NO_PROGRESS_S", 0.2)
    server = Server(world, "a")
    world.issue(make_task(1))
    async with server.running():
        await eventually(lambda: server.begun == [1], "it begins")
        server.tasks.stop()
        await asyncio.wait_for(server.leasing, 3.0)
        await asyncio.wait_for(server.tasks.drain(30.0, asyncio.Event(), can_progress=lambda: False), 2.0)
    assert server.cancelled == [1] and world.pending() == 0, "released"


async def test_a_server_started_before_the_learner_waits_for_the_streams(unprepared_world) -> None:
    world = unprepared_world
    server = Server(world, "a")
    server.let.set()
    async with server.running():
        await asyncio.sleep(0.3)
        world.create()
        world.issue(make_task(1))
        await eventually(lambda: len(world.published()) == 1, "it goes on by itself")
    waits = server.stats.waits.seconds()
    assert waits["learner"] > 0.1 and "redis" not in waits, "nothing is wrong with Redis"


async def test_a_closed_gate_leases_nothing(world) -> None:
    server = Server(world, "a")
    server.let.set()
    server.tasks.accept(False)
    world.issue(make_task(1))
    async with server.running():
        await asyncio.sleep(0.3)
        assert server.begun == []
        server.tasks.accept(True)
        await eventually(lambda: len(world.published()) == 1, "an open gate lets it through")


async def test_before_the_learner_it_says_what_it_waits_for(world, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = Server(world, "a")
    world.sync.delete(world.keys.tasks)
    async with server.running(beating=False):
        await eventually(lambda: f"waiting for the learner to start run {world.keys.run}" in caplog.text, "it says so")
        assert "StateLost" not in caplog.text and "NOGROUP" not in caplog.text


@pytest.mark.parametrize(("epoch", "step", "old"), [(1, 2, True), (1, 3, False), (1, 9, False), (0, 0, False)])
async def test_a_group_is_too_old_beyond_max_lag_and_within_its_epoch_alone(
    world, epoch: int, step: int, old: bool
) -> None:
    server = Server(world, "a")
    fleet = Fleet(server.redis, WaitTimer(), poll_s=1.0)
    fleet.table = FleetTable(target=PolicyVersion(1, 5))
    work = TaskRunner(server.tasks, None, server.publisher, fleet, server.stats, max_lag=2)
    assert work.too_old(PolicyVersion(epoch, step)) is old
