"""Leases on tasks: take them, renew them, and reclaim those of dead servers.

A task that was read stays in the stream's pending list under this consumer's name until its group is published. While
the lease is renewed, no other server may take the task; after `idle_ms` without renewal, another server takes it over.
A killed server therefore loses only its unfinished groups, and a server that was suspended for long finds its leases
lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from protocol.codec import decode_as, number_of
from protocol.errors import ProtocolError, StateLost
from protocol.functions import BEAT
from protocol.keys import TASK_GROUP
from protocol.messages import GroupFailed, Task
from protocol.runtime.lifecycle import cancel_all
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats

log = logging.getLogger(__name__)

MAX_DELIVERIES = 3
"""A task delivered more often than this has probably killed its servers: it is dropped as poison."""
NO_PROGRESS_S = 3.0
"""How long a drain waits while there is no engine: one that is restarting may be back by then."""
BACKLOG_LOOK_S = 0.05
"""Interval at which a server under backpressure checks whether it can lease again."""
HAND_BACK_S = 3.0
"""How long a shutdown tries to release tasks. Tasks not released are taken over after their lease timeout."""


@dataclass
class TaskLease:
    """A task leased by this server. `entry` is its id in the task stream.

    publishing  set when its result is being published: a lost lease no longer matters then
    """

    entry: str
    task: Task
    publishing: bool = False


Delivery = tuple[str, dict[bytes, bytes], int]
"""Entry id, fields, and how often it has been delivered, this time included."""
RunTask = Callable[[TaskLease], Awaitable[None]]
"""Runs a leased task until it is published, replaced by its next attempt, or dropped. Does not raise."""


class LeasePool:
    """The leases of this server. `consumer` is unique per process, so that no other process renews them."""

    def __init__(
        self,
        redis: RedisClient,
        publisher: GroupPublisher,
        stats: Stats,
        *,
        consumer: str,
        concurrency: int,
        idle_ms: int,
        backpressure: Callable[[], str] = lambda: "",
    ) -> None:
        """backpressure  returns what a new group would have to wait for, "" if it could start. While it is not empty,
        tasks stay in the stream, where another server may take them."""
        self._redis, self._publisher, self._stats = redis, publisher, stats
        self._consumer, self._concurrency, self._idle_ms = consumer, concurrency, idle_ms
        self._backpressure = backpressure
        self.in_flight: dict[str, tuple[TaskLease, asyncio.Task[None]]] = {}
        self._freed = asyncio.Event()
        self._accepting = asyncio.Event()
        self._accepting.set()
        self._stopping = False
        self._next_reclaim = 0.0

    def accept(self, yes: bool) -> None:
        """Allow or stop the leasing of new tasks. Tasks in flight continue."""
        if yes:
            self._accepting.set()
        else:
            self._accepting.clear()

    def stop(self) -> None:
        """Stop leasing permanently: `lease_loop` returns after its current read."""
        self._stopping = True
        self._accepting.set()
        self._freed.set()

    async def lease_loop(self, group: asyncio.TaskGroup, run_task: RunTask) -> None:
        """Consume tasks (new, or with an expired lease); produce one `run_task` in `group` for each.

        Waits for a free slot, for permission (`accept`), for engines or retriever (`backpressure`) and for a task in
        the stream. Unblocked by a finished group, by the clock, by the learner that issues tasks, or by an expired
        lease. Ended by `stop`, within BLOCK_MS.
        """
        waiting = f"waiting for the learner to start run {self._redis.keys.run}"
        backoff = Backoff("leasing tasks", self._stats.waits, at_first=waiting)
        while not self._stopping:
            await self._accepting.wait()
            await self._wait_for_capacity()
            if self._stopping:
                return
            if cause := self._backpressure():
                with self._stats.waits.blocked_on(cause):
                    await asyncio.sleep(BACKLOG_LOOK_S)
                continue
            try:
                entries = await self._reclaim() or await self._read()
            except (RedisUnavailable, StateLost) as error:
                self._next_reclaim = 0.0  # the lost reply may have delivered tasks
                await backoff.sleep(error)
                continue
            backoff.reset()
            for entry, fields, deliveries in entries:
                # a Redis that lost its last second of writes delivers tasks again that are in flight here
                lease = await self._decode(entry, fields) if entry not in self.in_flight else None
                if lease is not None and deliveries > MAX_DELIVERIES:
                    await self._drop_poison(lease, fields[b"b"], deliveries)
                elif lease is not None:
                    self._start(group, lease, run_task)

    async def renew_loop(self) -> None:
        """Consume the leases in flight; reset their idle times in Redis; wait a third of `idle_ms`.

        Cancels a task whose lease another server has taken, unless its result is already being published.
        """
        backoff = Backoff("renewing leases", self._stats.waits, longest_s=self._idle_ms / 6000)
        while True:
            await asyncio.sleep(self._idle_ms / 3000)
            while True:
                try:
                    await self._renew()
                except (RedisUnavailable, StateLost) as error:
                    await backoff.sleep(error)
                else:
                    backoff.reset()
                    break

    async def drain(
        self, seconds: float, hurry: asyncio.Event, *, can_progress: Callable[[], bool] = lambda: True
    ) -> None:
        """Let groups in flight finish, for `seconds` or until `hurry`. Release the tasks of those that did not.

        can_progress  False while no group can finish (there is no engine, as when a whole run is stopped): the wait
                      also ends after NO_PROGRESS_S of that
        """
        running = {task for _, task in self.in_flight.values()}
        now = hoped = time.monotonic()
        deadline = now + seconds
        while running and not hurry.is_set() and now < min(deadline, hoped + NO_PROGRESS_S):
            await asyncio.wait(running, timeout=min(0.1, deadline - now))
            running = {task for task in running if not task.done()}
            now = time.monotonic()
            hoped = now if can_progress() else hoped
        unfinished = [lease for lease, task in self.in_flight.values() if not task.done()]
        await cancel_all(running)
        try:
            async with asyncio.timeout(HAND_BACK_S):
                for lease in unfinished:
                    log.info("releasing the task of seq %d", lease.task.seq)
                    if await self._publisher.replace(lease.entry, lease.task):
                        self._stats.counts["tasks_released"] += 1
        except TimeoutError:
            log.warning("Redis is unavailable: tasks not released are taken over when their leases expire")

    async def deregister(self) -> None:
        """Remove this consumer from the group, unless tasks are pending. Raises RedisUnavailable, StateLost."""
        tasks = self._redis.keys.tasks
        async with self._redis.commands() as commands:
            if not await commands.xpending_range(tasks, TASK_GROUP, "-", "+", 1, consumername=self._consumer):
                await commands.xgroup_delconsumer(tasks, TASK_GROUP, self._consumer)

    @property
    def free_slots(self) -> int:
        """Number of groups that may be started. Groups that only wait to be published are bounded by the spool."""
        return self._concurrency - sum(not lease.publishing for lease, _ in self.in_flight.values())

    def finished(self, lease: TaskLease) -> None:
        """Record that the group of `lease` only waits to be published, so another group may start."""
        lease.publishing = True
        self._freed.set()

    async def _wait_for_capacity(self) -> None:
        while self.free_slots <= 0 and not self._stopping:
            self._freed.clear()
            await self._freed.wait()

    async def _read(self) -> list[Delivery]:
        with self._stats.waits.blocked_on("credit"):
            entries = await self._redis.read(self._redis.keys.tasks, TASK_GROUP, self._consumer, self.free_slots)
        return [(entry.decode(), fields, 1) for entry, fields in entries]

    async def _reclaim(self) -> list[Delivery]:
        """Take over tasks with expired leases, and own ones whose delivery was lost. Checked a few times per `idle_ms`.

        One look covers all pending tasks, O(tasks leased by all servers) in Redis, however few slots are free.
        """
        if time.monotonic() < self._next_reclaim:
            return []
        # renew our own first: after an outage of Redis they are idle too, and a claim counts as a delivery
        await self._renew()
        tasks, free, ours = self._redis.keys.tasks, self.free_slots, self._consumer.encode()
        own = free + len(self.in_flight)
        async with self._redis.commands(tasks) as commands:
            expired: Any = await commands.xpending_range(tasks, TASK_GROUP, "-", "+", free, idle=self._idle_ms)
            mine: Any = await commands.xpending_range(tasks, TASK_GROUP, "-", "+", own, consumername=self._consumer)
        # a reply that was lost delivered tasks that do not run: it does not count as another delivery
        orphans = [seen for seen in mine if seen["message_id"].decode() not in self.in_flight]
        found: list[Delivery] = []
        for seen in (*orphans, *(seen for seen in expired if seen["consumer"] != ours))[:free]:
            taken_over = seen["consumer"] != ours
            deliveries = int(seen["times_delivered"]) + taken_over
            # if another server claims it first, it is idle for less
            idle_ms = min(self._idle_ms, int(seen["time_since_delivered"]))
            async with self._redis.commands(tasks) as commands:
                claimed: Any = await commands.xclaim(
                    tasks, TASK_GROUP, self._consumer, idle_ms, [seen["message_id"]], retrycount=deliveries
                )
            found += [(entry.decode(), fields, deliveries) for entry, fields in claimed]
            self._stats.counts["reclaimed"] += len(claimed) * (taken_over and deliveries <= MAX_DELIVERIES)
        if len(found) < free:
            self._next_reclaim = time.monotonic() + self._idle_ms / 4000
        return sorted(found, key=lambda delivery: delivery[2])  # poison is reported last: that may wait for Redis

    async def _drop_poison(self, lease: TaskLease, raw: bytes, deliveries: int) -> None:
        seq, detail = lease.task.seq, f"delivered {deliveries} times without a result"
        log.error("dropping seq %d as poison: %s", seq, detail)
        await self._publisher.write_dead_letter(lease.entry, seq, raw, "task_poison", detail)
        await self._publisher.emit_event("poison", f"seq {seq} was dropped: {detail}")
        await self._publisher.publish(lease.entry, self.failed(lease.task, "poison", detail))

    def failed(self, task: Task, reason: str, detail: str = "", generated_tokens: int = 0) -> GroupFailed:
        """Return the message that reports a task as failed."""
        return GroupFailed(
            run=self._redis.keys.run,
            seq=task.seq,
            attempt=task.attempt,
            question_id=task.question.id,
            reason=reason,
            detail=detail,
            generated_tokens=generated_tokens,
            producer=self._stats.id,
        )

    async def _decode(self, entry: str, fields: dict[bytes, bytes]) -> TaskLease | None:
        """Return the lease on an entry. Write an unreadable entry to the dead letters and return None."""
        raw = fields.get(b"b", b"")
        seq = number_of(fields.get(b"seq", b"")) or None
        try:
            task = decode_as(Task, raw)
            if task.seq != seq:
                raise ProtocolError(f"the body has seq {task.seq}")
        except ProtocolError as error:
            self._stats.counts["unreadable_tasks"] += 1
            await self._publisher.dead_letter(entry, seq, raw, error, self._redis.keys.run)
            return None
        return TaskLease(entry, task)

    def _start(self, group: asyncio.TaskGroup, lease: TaskLease, run_task: RunTask) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            del self.in_flight[lease.entry]
            self._freed.set()

        issued_s = int(lease.entry.partition("-")[0]) / 1000
        self._stats.distribute("task_queue_age_seconds", max(0.0, time.time() - issued_s))
        running = group.create_task(_carry(run_task, lease), name=f"seq-{lease.task.seq}")
        self.in_flight[lease.entry] = (lease, running)
        # a callback, because a task that is cancelled before its first step does not run its `finally`
        running.add_done_callback(ended)

    async def _renew(self) -> None:
        entries = list(self.in_flight)
        if not entries:
            return
        mine: Any = await self._redis.call(BEAT, [self._redis.keys.tasks], self._consumer, *entries, urgent=True)
        for entry in sorted(set(entries) - {raw.decode() for raw in mine}):
            lease, task = self.in_flight.get(entry, (None, None))
            if lease is not None and task is not None and not lease.publishing:
                log.warning("lost the lease on seq %d: another server has taken it over", lease.task.seq)
                self._stats.counts["leases_lost"] += 1
                task.cancel()
                await self._publisher.emit_event("lease-lost", f"another server has taken over seq {lease.task.seq}")


async def _carry(run_task: RunTask, lease: TaskLease) -> None:
    await run_task(lease)
