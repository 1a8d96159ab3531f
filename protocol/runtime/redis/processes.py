"""What running processes report about themselves in Redis: snapshots of metrics that expire, listed by kind.

A snapshot is also the registration of a service: its text has `url`, `state` (of NodeState) and `incarnation`. Rollout
servers send queries to the retrievers registered so, and viewers send their tokens to nothing else.
"""

from __future__ import annotations

import logging

from protocol.codec import decode_as, encode
from protocol.errors import ProtocolError
from protocol.functions import REPORT
from protocol.messages import MetricsSnapshot, NodeState
from protocol.runtime.redis.aio import RedisClient

log = logging.getLogger(__name__)

PERIOD_S = 1.0
LIFETIME_MS = 10_000
"""A snapshot that is not renewed expires after this time, and the process disappears from every list."""


async def write(redis: RedisClient, snapshot: MetricsSnapshot) -> None:
    """Write or renew the snapshot of a process. Raises RedisUnavailable."""
    keys, raw, member = redis.keys, encode(snapshot), f"{snapshot.process}:{snapshot.id}"
    now = await redis.now()
    key, until = keys.metrics(snapshot.process, snapshot.id), now + LIFETIME_MS / 1000
    await redis.write(
        ("SET", key, raw, "PX", LIFETIME_MS),
        ("ZADD", keys.processes, until, member),
        # every writer also removes the entries of killed processes
        ("ZREMRANGEBYSCORE", keys.processes, "-inf", now - 60),
        full=(REPORT, [key, keys.processes], raw, LIFETIME_MS, str(until), member),
    )


async def remove(redis: RedisClient, process: str, process_id: str) -> None:
    """Remove a process from the lists at shutdown. Raises RedisUnavailable."""
    await redis.batch(
        ("DEL", redis.keys.metrics(process, process_id)), ("ZREM", redis.keys.processes, f"{process}:{process_id}")
    )


async def ready_urls(redis: RedisClient, process: str) -> list[str]:
    """Return the URLs of the registered processes of a kind that are ready. Raises RedisUnavailable."""
    keys = redis.keys
    (listed,) = await redis.batch(("ZRANGEBYSCORE", keys.processes, await redis.now(), "+inf"))
    names = [name.decode(errors="replace").partition(":") for name in listed]
    raws = await redis.batch(*(("GET", keys.metrics(kind, id_)) for kind, _, id_ in names if kind == process))
    return [found.text["url"] for raw in raws if raw and (found := _decoded(raw)) and _takes_requests(found)]


def _takes_requests(found: MetricsSnapshot) -> bool:
    return found.text.get("state") == NodeState.READY and bool(found.text.get("url"))


def _decoded(raw: bytes) -> MetricsSnapshot | None:
    try:
        return decode_as(MetricsSnapshot, raw)
    except ProtocolError as error:
        log.debug("ignoring a snapshot: %s: %s", error.reason, error)
        return None
