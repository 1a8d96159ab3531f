"""Publish finished groups: encode and sign them, and send them to a Redis function that also acknowledges the task.

Publishing is idempotent: after any error the same call is repeated, and `DUP` (the task was already published, by this
server or by one that took it over) counts as success. A finished group is published even if the lease was lost
meanwhile; failures and next attempts only by the owner of the lease.

While Redis is unavailable or full, finished groups wait in memory: the spool. It is bounded because no group starts
while `spool_full`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.codec import encode
from protocol.errors import MessageTooLarge, ProtocolError
from protocol.functions import BEAT, PUBLISH, RETRY
from protocol.header import seal
from protocol.keys import TASK_GROUP
from protocol.messages import TASK_UNREADABLE, GroupFailed, Task, TrajectoryGroup
from protocol.runtime.redis.aio import Backoff, RedisClient, retry_until_available
from protocol.runtime.redis.errors import RedisRefused
from rollout_server.metrics import Stats, emit_event

log = logging.getLogger(__name__)

PARALLEL = 64
"""Maximum number of groups and tasks in transfer to Redis; a burst of hundreds would need as many connections."""
DLQ_LENGTH = 1000
"""Maximum length of the dead-letter stream."""
DLQ_BYTES = 1 << 16
"""Maximum bytes per dead letter: with DLQ_LENGTH entries the stream stays below 64 MiB."""


class GroupPublisher:
    """Publishes by task entry id. All but `emit_event` wait while Redis is unavailable, full or has lost its state.

    consumer  name that owns this server's leases; "": ownership is not checked
    """

    def __init__(
        self,
        redis: RedisClient,
        stats: Stats,
        *,
        consumer: str = "",
        spool_groups: int = 32,
        spool_bytes: int = 512 << 20,
    ) -> None:
        self._redis, self._stats = redis, stats
        self._owner = (consumer,) if consumer else ()
        self._transfers = asyncio.Semaphore(PARALLEL)
        self._spool_groups, self._spool_bytes = spool_groups, spool_bytes
        self._spool: dict[str, tuple[float, int]] = {}
        """task entry -> (start of the wait, monotonic; bytes)"""
        stats.gauges |= {
            "spooled_groups": lambda: self.spooled,
            "spooled_bytes": lambda: self.spooled_bytes,
            "spool_age_s": lambda: self.spool_age_s,
        }

    @property
    def spooled(self) -> int:
        """Number of finished groups that wait to be published, or for their task to be released."""
        return len(self._spool)

    @property
    def spooled_bytes(self) -> int:
        """Bytes of the groups in the spool."""
        return sum(size for _, size in self._spool.values())

    @property
    def spool_age_s(self) -> float:
        """Age of the oldest group in the spool, in seconds. Large when Redis is unavailable, full or very slow."""
        now = time.monotonic()
        return max((now - since for since, _ in self._spool.values()), default=0.0)

    @property
    def spool_full(self) -> bool:
        """Whether the spool has reached a limit, so that no other group should start."""
        return self.spooled >= self._spool_groups or self.spooled_bytes >= self._spool_bytes

    async def publish(self, entry: str, message: TrajectoryGroup | GroupFailed) -> bool:
        """Publish `message`. Return False if the task was already published, or is a failure whose lease is lost.

        A DUP after a lost reply counts as a duplicate too: the first try may have come from another server.
        """
        try:
            header, body = seal(message)
        except MessageTooLarge as error:
            message = _too_large(message, error)
            header, body = seal(message)
        tokens, failed = tokens_of(message), isinstance(message, GroupFailed)
        with self._spooling(entry, len(header) + len(body)):
            names = [self._redis.keys.tasks, self._redis.keys.traj, self._redis.keys.tokens]
            values = (entry, message.seq, header, body, tokens, *(self._owner if failed else ()))
            reply = await self._send(f"publishing seq {message.seq}", PUBLISH, names, *values)
        if reply == b"DUP":
            self._stats.counts["duplicates"] += 1
            return False
        self._stats.counts["groups_failed" if failed else "groups_published"] += 1
        return True

    async def _send(self, doing: str, function: str, names: list[str], *values: str | bytes | int) -> bytes:
        async def transfer() -> bytes:
            async with self._transfers:
                reply: bytes = await self._redis.call(function, names, *values)
            return reply

        return await retry_until_available(Backoff(doing, self._stats.waits), transfer)

    async def replace(self, entry: str, task: Task, tokens: int = 0) -> bool:
        """Replace the task at `entry` with `task`. Return False if another server has settled or leased that entry.

        With the next attempt number this is a retry. With the same number it releases the task: another server can
        lease it at once instead of after the lease timeout. `tokens` is the number of tokens sampled and discarded.
        """
        names, body = [self._redis.keys.tasks, self._redis.keys.tokens], encode(task)
        with self._spooling(entry, len(body)):
            values = (entry, task.seq, body, tokens, *self._owner)
            return await self._send(f"replacing the task of seq {task.seq}", RETRY, names, *values) != b"DUP"

    @contextmanager
    def _spooling(self, entry: str, size: int) -> Iterator[None]:
        self._spool[entry] = (time.monotonic(), size)
        try:
            yield
        finally:
            self._spool.pop(entry, None)

    async def dead_letter(self, entry: str, seq: int | None, raw: bytes, error: ProtocolError, run: str) -> None:
        """Write an unreadable task to the dead-letter stream, and publish its seq as failed if it is known."""
        reason = f"{TASK_UNREADABLE}{error.reason}"
        log.error("cannot read task %s (seq %s): %s: %s", entry, seq, reason, error)
        await self.write_dead_letter(entry, seq, raw, reason, str(error))
        backoff = Backoff(f"writing the dead letter of task {entry}", self._stats.waits)
        if seq is not None:
            await self.publish(entry, GroupFailed(run=run, seq=seq, attempt=1, reason=reason, producer=self._stats.id))
        else:
            # no seq to report: the learner's reconciler finds the seq missing and issues it again
            await retry_until_available(backoff, lambda: self._acknowledge(entry))

    async def emit_event(self, kind: str, text: str) -> None:
        """Append an event to the run's history, as `emit_event` of `rollout_server/metrics.py`."""
        await emit_event(self._redis, self._stats, kind, text)

    async def write_dead_letter(self, entry: str, seq: int | None, raw: bytes, reason: str, detail: str) -> None:
        """Append a dead letter (fields: `foray/watch/dead_letters.py`) for the task at `entry`."""
        letter = {"id": entry, "seq": str(seq or 0), "reason": reason, "detail": detail[:1000], "from": self._stats.id}
        backoff = Backoff(f"storing the dead letter of task {entry}", self._stats.waits)
        await retry_until_available(backoff, lambda: self._append_dead_letter(letter, raw))

    async def _append_dead_letter(self, letter: dict[str, str], raw: bytes) -> None:
        flat = [part for pair in letter.items() for part in pair]
        evidence = ("h", b"", "b", raw[:DLQ_BYTES])
        try:
            await self._redis.batch(("XADD", self._redis.keys.dlq, "MAXLEN", "~", DLQ_LENGTH, "*", *flat, *evidence))
        except RedisRefused as error:
            # dead letters are for operators: the task must not wait for them
            log.error("could not store the dead letter of task %s: %s", letter["id"], error)

    async def _acknowledge(self, entry: str) -> None:
        tasks = self._redis.keys.tasks
        # a renewed lease cannot be taken over before the XACK
        if not self._owner or await self._redis.call(BEAT, [tasks], *self._owner, entry):
            await self._redis.batch(("XACK", tasks, TASK_GROUP, entry))


def tokens_of(message: TrajectoryGroup | GroupFailed) -> int:
    """Return the number of tokens that the policy sampled for `message`."""
    if isinstance(message, GroupFailed):
        return message.generated_tokens
    return sum(t.num_sampled for t in message.trajectories)


def _too_large(message: TrajectoryGroup | GroupFailed, error: MessageTooLarge) -> GroupFailed:
    return GroupFailed(
        run=message.run,
        seq=message.seq,
        attempt=message.attempt,
        reason=error.reason,
        detail=str(error),
        generated_tokens=tokens_of(message),
        producer=message.producer,
    )
