"""What a node writes to Redis: the registration of its engine, a lease that expires when its heartbeats stop.

And what it reads: the target version, the view of the current transfer, and whether an evaluation runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from dataclasses import dataclass
from typing import TypeVar

from protocol.arrays import Message
from protocol.codec import decode_as, encode
from protocol.errors import ProtocolError, UserError
from protocol.functions import REGISTER
from protocol.messages import EngineInfo, ViewAnswer, WeightUpdate, WeightView
from protocol.runtime.lifecycle import has_ended, process_token
from protocol.runtime.redis.aio import RedisClient
from protocol.versions import PolicyVersion, VersionPin
from protocol.weights import WeightBucket, WeightPlan
from rollout_server.dispatch.fleet import RunCompatibility
from rollout_server.metrics import Stats, emit_event

log = logging.getLogger(__name__)

ANSWER_TTL_MS, NEW_ANSWER_TTL_MS = 3_600_000, 60_000
UNWOKEN_S = 0.05
"""Seconds between two looks of a node that may not read the stream which wakes it."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class TargetView:
    """What the learner has announced at one moment, and Redis' clock in seconds.

    pin        of a running evaluation
    validated  the version that it needs
    """

    target: WeightUpdate | None
    view: WeightView | None
    now: float
    pin: VersionPin | None = None
    validated: WeightUpdate | None = None

    @property
    def left_s(self) -> float:
        """Seconds to the deadline of the view."""
        return self.view.deadline - self.now if self.view is not None else 0.0

    def wanted(self, role: str, held: PolicyVersion) -> WeightUpdate | None:
        """Return what an engine of `role` that holds `held` should load: the target, or the version under validation if
        the target is beyond it and the engine has not reached it yet."""
        pin, target, validated = self.pin, self.target, self.validated
        if pin is None or pin.version is None or target is None or validated is None:
            return target
        late = pin.concerns(role) and held < pin.version < target.version
        return validated if late and validated.path and validated.version == pin.version else target


class Registry:
    """Every method raises RedisUnavailable. Reading the target also raises UserError for an incompatible learner."""

    def __init__(self, redis: RedisClient, *, lease_s: float, compatibility: RunCompatibility | None = None) -> None:
        self._redis, self.lease_s, self._compatibility = redis, lease_s, compatibility
        self._garbage: set[bytes] = set()
        self._token = f"{process_token()}:{secrets.token_hex(4)}"
        self._woken = "0"
        self._plan: tuple[str, tuple[WeightBucket, ...]] = ("", ())

    async def register(self, info: EngineInfo) -> bool:
        """Write or renew the registration. Return False if it is another living node's.

        It expires by Redis' clock: the clocks of hosts need not agree. Two nodes that start at once may both write; at
        their next renewal one of them sees the other.
        """
        if not await self._is_ours(info.id):
            return False
        keys = self._redis.keys
        now = await self._redis.now()
        key, body, ttl_ms, until = keys.engine(info.id), encode(info), int(self.lease_s * 1000), now + self.lease_s
        await self._redis.write(
            ("HSET", key, "b", body, "owner", self._token),
            ("PEXPIRE", key, ttl_ms),
            ("ZADD", keys.engines, until, info.id),
            # every write also removes the ids of killed nodes
            ("ZREMRANGEBYSCORE", keys.engines, "-inf", now - 60),
            full=(REGISTER, [key, keys.engines], "b", body, ttl_ms, str(until), info.id),
            atomic=True,
        )
        return True

    async def _is_ours(self, engine_id: str) -> bool:
        """Return whether no other node holds the registration, or one of this machine that has ended."""
        try:
            (raw,) = await self._redis.batch(("HGET", self._redis.keys.engine(engine_id), "owner"))
        except UserError as error:  # an ACL file of an older Foray
            log.debug("cannot see whether another node has the id %s: %s", engine_id, error)
            return True
        owner = raw.decode(errors="replace") if raw else self._token
        return owner == self._token or has_ended(owner)

    async def deregister(self, engine_id: str) -> None:
        """Remove the registration of the engine, unless it is another node's."""
        keys = self._redis.keys
        if await self._is_ours(engine_id):
            await self._redis.batch(("ZREM", keys.engines, engine_id), ("DEL", keys.engine(engine_id)))

    async def emit_event(self, stats: Stats, kind: str, text: str) -> None:
        """Append an event to the run's history."""
        await emit_event(self._redis, stats, kind, text)

    async def take_drain_request(self, engine_id: str) -> bool:
        """Return whether an operator has asked the engine to drain, and remove the request."""
        (found,) = await self._redis.batch(("SREM", self._redis.keys.drain, engine_id))
        return bool(found)

    async def target(self) -> WeightUpdate | None:
        """Return the target version; None before the first one, or if it cannot be decoded."""
        keys = self._redis.keys
        raw, meta = await self._redis.batch(("HGET", keys.target, "b"), ("HGETALL", keys.meta))
        if self._compatibility is not None:
            self._compatibility.check(meta)
        return self._decoded(WeightUpdate, raw)

    async def target_view(self) -> TargetView:
        """Return target and view, read atomically."""
        keys = self._redis.keys
        target, view, (seconds, micros), meta, pin, validated = await self._redis.batch(
            *(("HGET", keys.target, "b"), ("GET", keys.view), ("TIME",), ("HGETALL", keys.meta)),
            *(("GET", keys.evaluation), ("GET", keys.validated)),
            atomic=True,
        )
        if self._compatibility is not None:
            self._compatibility.check(meta)
        now = float(seconds) + float(micros) / 1e6
        return TargetView(
            self._decoded(WeightUpdate, target),
            self._decoded(WeightView, view),
            now,
            VersionPin.parse(pin),
            self._decoded(WeightUpdate, validated),
        )

    async def woken(self, longest_s: float) -> None:
        """Wait until target or view has changed since the last call, at most `longest_s`; then read them.

        What has changed between two calls ends the second at once, so no change is missed. A wake-up that Redis loses
        (it restarts, another learner's function does not send it) costs `longest_s`.
        """
        try:
            self._woken = await self._redis.wait(self._redis.keys.wake, self._woken, longest_s)
        except UserError as error:  # an ACL file of an older Foray
            log.debug("not woken by the learner: %s", error)
            await asyncio.sleep(min(longest_s, UNWOKEN_S))

    async def buckets(self, view: WeightView) -> tuple[WeightBucket, ...]:
        """Return the buckets of `view`; () if Redis does not hold the plan that it names. Reads each plan once."""
        if not view.plan or self._plan[0] == view.plan:
            return self._plan[1] if view.plan else view.buckets
        (raw,) = await self._redis.batch(("GET", self._redis.keys.plan))
        named = raw is not None and hashlib.sha256(raw).hexdigest() == view.plan  # not another learner's
        plan = self._decoded(WeightPlan, raw) if named else None
        if plan is not None:
            self._plan = view.plan, plan.buckets
        return plan.buckets if plan is not None else ()

    async def answer(self, view: WeightView, answer: ViewAnswer) -> None:
        """Report the progress of this engine in `view` to the learner."""
        keys, body = self._redis.keys, encode(answer)
        key, new = keys.answers(view.epoch, view.number), keys.new_answers(view.epoch, view.number)
        try:
            await self._redis.write(
                ("HSET", key, answer.member, body),
                ("PEXPIRE", key, ANSWER_TTL_MS),
                ("XADD", new, "*", "b", body),
                ("PEXPIRE", new, NEW_ANSWER_TTL_MS),
                full=(REGISTER, [key], answer.member, body, ANSWER_TTL_MS),
            )
        except UserError as error:  # an ACL file of an older Foray; the hash is written
            log.debug("the learner is not woken by this answer: %s", error)

    def _decoded(self, kind: type[M], raw: bytes | None) -> M | None:
        if raw is None or raw in self._garbage:
            return None
        try:
            return decode_as(kind, raw)
        except ProtocolError as error:
            self._garbage = {*sorted(self._garbage)[:8], raw}
            log.error("ignoring a %s: %s: %s", kind.__name__, error.reason, error)
            return None

    async def held_back(self, role: str, version: PolicyVersion) -> bool:
        """Return whether an evaluation keeps engines of `role` from loading `version`."""
        (raw,) = await self._redis.batch(("GET", self._redis.keys.evaluation))
        pin = VersionPin.parse(raw)
        return pin is not None and pin.holds_back(role, version)
