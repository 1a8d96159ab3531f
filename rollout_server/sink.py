"""Where finished groups go: sealed, then published by one server-side function that also acknowledges the task.

Publishing twice is safe, and that is what makes it simple: after any error the same call is made again, and `DUP`
(this task was published before, by us or by the server that took it over) is a success.
"""

from __future__ import annotations

import logging

from protocol.codec import encode
from protocol.errors import MessageTooLarge
from protocol.functions import PUBLISH, RETRY
from protocol.header import seal
from protocol.keys import TASK_GROUP
from protocol.messages import GroupFailed, Task, TrajectoryGroup
from rollout_server.metrics import Stats
from rollout_server.redis_client import Outage, RedisClient, insist

log = logging.getLogger(__name__)

DLQ_LENGTH = 1000
"""Entries kept in the dead-letter stream: evidence, not a queue."""
DLQ_BYTES = 1 << 20
"""Bytes kept of one dead letter."""


class Sink:
    """Publishes by task entry id. Every method waits while Redis is away, full or has lost its state."""

    def __init__(self, redis: RedisClient, stats: Stats) -> None:
        self._redis, self._stats = redis, stats

    async def publish(self, entry: str, message: TrajectoryGroup | GroupFailed) -> bool:
        """True when this call (or an earlier try of it) published, False when the task was published before.

        Two tries of ours cannot be told from two servers, so a DUP after a lost reply counts as a duplicate too.
        """
        try:
            header, body = seal(message)
        except MessageTooLarge as error:
            message = _too_large(message, error)
            header, body = seal(message)
        keys = self._redis.keys
        outage = Outage(f"publishing seq {message.seq}", self._stats.waits)
        reply = await insist(
            outage,
            lambda: self._redis.call(
                PUBLISH, [keys.tasks, keys.traj, keys.tokens], entry, message.seq, header, body, tokens_of(message)
            ),
        )
        if reply == b"DUP":
            self._stats.counts["duplicates"] += 1
            return False
        self._stats.counts["groups_failed" if isinstance(message, GroupFailed) else "groups_published"] += 1
        return True

    async def replace(self, entry: str, task: Task, tokens: int = 0) -> bool:
        """Put `task` in the place of the one at `entry`; False when somebody else has settled that.

        With the next attempt's number this is a retry; with the same number the task is handed back, and another
        server takes it at once rather than after our lease has run out. `tokens` were sampled in vain.
        """
        outage = Outage(f"replacing the task of seq {task.seq}", self._stats.waits)
        keys, body = [self._redis.keys.tasks, self._redis.keys.tokens], encode(task)
        reply = await insist(outage, lambda: self._redis.call(RETRY, keys, entry, task.seq, body, tokens))
        return bool(reply != b"DUP")

    async def bury(self, entry: str, seq: int | None, raw: bytes, reason: str, run: str) -> None:
        """A task that cannot be read: evidence to the dead-letter stream, and its seq (if known) is given up."""
        log.error("task %s (seq %s) is unreadable: %s", entry, seq, reason)
        outage = Outage(f"burying task {entry}", self._stats.waits)
        await insist(outage, lambda: self._dead_letter(seq, raw, reason))
        if seq is not None:
            await self.publish(entry, GroupFailed(run=run, seq=seq, attempt=1, reason=reason, producer=self._stats.id))
        else:
            # nothing to report it under: the learner's reconciler misses the seq and issues it again
            await insist(outage, lambda: self._acknowledge(entry))

    async def _dead_letter(self, seq: int | None, raw: bytes, reason: str) -> None:
        fields = ("reason", reason, "seq", str(seq), "from", self._stats.id, "raw", raw[:DLQ_BYTES])
        await self._redis.batch(("XADD", self._redis.keys.dlq, "MAXLEN", "~", DLQ_LENGTH, "*", *fields))

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
