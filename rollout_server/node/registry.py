"""What a node writes to Redis: the registration of its engine, a lease that ends when it stops beating.

And what it reads there: the target version, and whether an evaluation is going on.
"""

from __future__ import annotations

import logging

from protocol.codec import decode_as, encode
from protocol.errors import ProtocolError
from protocol.messages import EngineInfo, WeightUpdate
from rollout_server.redis_client import RedisClient

log = logging.getLogger(__name__)


class Registry:
    """Every method raises RedisDown or RedisFull."""

    def __init__(self, redis: RedisClient, *, lease_s: float) -> None:
        self._redis, self._lease_s = redis, lease_s
        self._garbage = b""

    async def register(self, info: EngineInfo) -> None:
        """Write or renew the registration. Its end is reckoned by Redis' clock: hosts need not agree on the time."""
        keys = self._redis.keys
        now = await self._redis.now()
        await self._redis.batch(
            ("HSET", keys.engine(info.id), "b", encode(info)),
            ("PEXPIRE", keys.engine(info.id), int(self._lease_s * 1000)),
            ("ZADD", keys.engines, now + self._lease_s, info.id),
            # whoever writes also sweeps: ids of nodes that were killed
            ("ZREMRANGEBYSCORE", keys.engines, "-inf", now - 60),
            atomic=True,
        )

    async def withdraw(self, engine_id: str) -> None:
        """Take the engine off the list."""
        keys = self._redis.keys
        await self._redis.batch(("ZREM", keys.engines, engine_id), ("DEL", keys.engine(engine_id)))

    async def target(self) -> WeightUpdate | None:
        """The version that every engine should hold; None before the learner's first, or when it does not decode."""
        (raw,) = await self._redis.batch(("HGET", self._redis.keys.target, "b"))
        if raw is None or raw == self._garbage:
            return None
        try:
            return decode_as(WeightUpdate, raw)
        except ProtocolError as error:
            self._garbage = raw
            log.error("ignoring the target: %s: %s", error.reason, error)
            return None

    async def evaluating(self) -> bool:
        """Whether an evaluation wants the versions to stand still."""
        (there,) = await self._redis.batch(("EXISTS", self._redis.keys.evaluation))
        return bool(there)
