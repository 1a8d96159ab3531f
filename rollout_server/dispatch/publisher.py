"""Publish finished groups: sealed, then sent by one server-side function that also acknowledges the task.

Publishing twice is safe, and that is what makes it simple: after any error the same call is made again, and `DUP`
(this task was published before, by us or by the server that took it over) is a success.

While Redis is away or full, finished groups wait here: that is the spool. It is bounded by the
check of `spool_full` before another group begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from protocol import events
from protocol.codec import encode
from protocol.errors import MessageTooLarge, ProtocolError, StateLost, UserError
from protocol.functions import PUBLISH, RETRY
from protocol.header import seal
from protocol.keys import TASK_GROUP
from protocol.messages import TASK_UNREADABLE, GroupFailed, Task, TrajectoryGroup
from protocol.runtime.redis.aio import Backoff, RedisClient, retry_until_available
from protocol.runtime.redis.errors import RedisRefused, RedisUnavailable
from rollout_server.metrics import Stats

log = logging.getLogger(__name__)

DLQ_LENGTH = 1000
"""Entries kept in the dead-letter stream."""
DLQ_BYTES = 1 << 16
"""Bytes kept of one dead letter: with DLQ_LENGTH of them the stream stays below 64 MiB."""


class GroupPublisher:
    """Publishes by task entry id. All but `emit_event` wait while Redis is away, full or has lost its state."""

    def __init__(
        self, redis: RedisClient, stats: Stats, *, spool_groups: int = 32, spool_bytes: int = 512 << 20
    ) -> None:
        self._redis, self._stats = redis, stats
        self._spool_groups, self._spool_bytes = spool_groups, spool_bytes
        self._spool: dict[str, tuple[float, int]] = {}
        """task entry -> (since when, by the monotonic clock; bytes)"""
        stats.gauges |= {
            "spooled_groups": lambda: self.spooled,
            "spooled_bytes": lambda: self.spooled_bytes,
            "spool_age_s": lambda: self.spool_age_s,
        }

    @property
    def spooled(self) -> int:
        """Groups that have ended and wait to be published, or for their task to be put back."""
        return len(self._spool)

    @property
    def spooled_bytes(self) -> int:
        """What they take."""
        return sum(size for _, size in self._spool.values())

    @property
    def spool_age_s(self) -> float:
        """Seconds that the oldest of them has waited: Redis is away or full, or very slow."""
        now = time.monotonic()
        return max((now - since for since, _ in self._spool.values()), default=0.0)

    @property
    def spool_full(self) -> bool:
        """Whether so much waits for Redis that no other group should begin."""
        return self.spooled >= self._spool_groups or self.spooled_bytes >= self._spool_bytes

    async def publish(self, entry: str, message: TrajectoryGroup | GroupFailed) -> bool:
        """True when this call (or an earlier try of it) published, False when the task was published before.

        Two tries of one server look like those of two servers, so a DUP after a lost reply counts as a duplicate too.
        """
        try:
            header, body = seal(message)
        except MessageTooLarge as error:
            message = _too_large(message, error)
            header, body = seal(message)
        tokens, failed = tokens_of(message), isinstance(message, GroupFailed)
        with self._spooling(entry, len(header) + len(body)):
            reply = await self._send(entry, message.seq, header, body, tokens)
        if reply == b"DUP":
            self._stats.counts["duplicates"] += 1
            return False
        self._stats.counts["groups_failed" if failed else "groups_published"] += 1
        return True

    async def _send(self, entry: str, seq: int, header: bytes, body: bytes, tokens: int) -> bytes:
        keys = self._redis.keys
        backoff = Backoff(f"publishing seq {seq}", self._stats.waits)
        names = [keys.tasks, keys.traj, keys.tokens]
        reply: bytes = await retry_until_available(
            backoff, lambda: self._redis.call(PUBLISH, names, entry, seq, header, body, tokens)
        )
        return reply

    async def replace(self, entry: str, task: Task, tokens: int = 0) -> bool:
        """Put `task` in the place of the one at `entry`; False when another server has settled that.

        With the next attempt's number this is a retry; with the same number the task is handed back, and another
        server takes it at once rather than after our lease has run out. `tokens` were sampled in vain.
        """
        backoff = Backoff(f"replacing the task of seq {task.seq}", self._stats.waits)
        keys, body = [self._redis.keys.tasks, self._redis.keys.tokens], encode(task)
        with self._spooling(entry, len(body)):
            reply = await retry_until_available(
                backoff, lambda: self._redis.call(RETRY, keys, entry, task.seq, body, tokens)
            )
        return bool(reply != b"DUP")

    @contextmanager
    def _spooling(self, entry: str, size: int) -> Iterator[None]:
        self._spool[entry] = (time.monotonic(), size)
        try:
            yield
        finally:
            self._spool.pop(entry, None)

    async def dead_letter(self, entry: str, seq: int | None, raw: bytes, error: ProtocolError, run: str) -> None:
        """Write a task that cannot be read to the dead-letter stream, and a failed attempt of its seq, if known."""
        reason = f"{TASK_UNREADABLE}{error.reason}"
        log.error("task %s (seq %s) is unreadable: %s: %s", entry, seq, reason, error)
        await self.write_dead_letter(entry, seq, raw, reason, str(error))
        backoff = Backoff(f"burying task {entry}", self._stats.waits)
        if seq is not None:
            await self.publish(entry, GroupFailed(run=run, seq=seq, attempt=1, reason=reason, producer=self._stats.id))
        else:
            # nothing to report it under: the learner's reconciler misses the seq and issues it again
            await retry_until_available(backoff, lambda: self._acknowledge(entry))

    async def emit_event(self, kind: str, text: str) -> None:
        """Append a line to the run's history (`protocol/events.py`). Lost, and counted, when Redis does not take it."""
        fields = events.fields(self._stats.process, self._stats.id, kind, text)
        flat = [part for pair in fields.items() for part in pair]
        try:
            await self._redis.batch(("XADD", self._redis.keys.events, "MAXLEN", "~", events.MOST, "*", *flat))
        except (RedisUnavailable, StateLost, UserError) as error:
            log.info("the event %r is not written: %s", kind, error)
            self._stats.counts["events_lost"] += 1

    async def write_dead_letter(self, entry: str, seq: int | None, raw: bytes, reason: str, detail: str) -> None:
        """Append a dead letter (fields: `deploy/dlq/dead_letters.py`) for the task at `entry`."""
        letter = {"id": entry, "seq": str(seq or 0), "reason": reason, "detail": detail[:1000], "from": self._stats.id}
        backoff = Backoff(f"keeping evidence of task {entry}", self._stats.waits)
        await retry_until_available(backoff, lambda: self._append_dead_letter(letter, raw))

    async def _append_dead_letter(self, letter: dict[str, str], raw: bytes) -> None:
        flat = [part for pair in letter.items() for part in pair]
        evidence = ("h", b"", "b", raw[:DLQ_BYTES])
        try:
            await self._redis.batch(("XADD", self._redis.keys.dlq, "MAXLEN", "~", DLQ_LENGTH, "*", *flat, *evidence))
        except RedisRefused as error:
            # it is for operators: the task must not wait for it
            log.error("evidence of task %s is not kept: %s", letter["id"], error)

    async def _acknowledge(self, entry: str) -> None:
        await self._redis.batch(("XACK", self._redis.keys.tasks, TASK_GROUP, entry))


def tokens_of(message: TrajectoryGroup | GroupFailed) -> int:
    """Tokens that the policy sampled for `message`."""
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
