"""The evaluation pin: one policy version for all evaluations that run on this server at the same time.

Nodes postpone weight swaps while the pin's key exists in Redis. The key alone guarantees nothing (a swap may have
started, a node may die), so the version is also chosen here: only engines with that version are used, and episodes
sampled at another one are repeated. If any engine has the role `eval`, only those engines are pinned and training
continues on the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

from protocol.errors import ForayError
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.versions import PolicyVersion, VersionPin
from rollout_server.dispatch.fleet import Fleet
from rollout_server.metrics import Stats

log = logging.getLogger(__name__)

PIN_MS = 10_000
"""Lifetime of the pin in Redis, in ms: it outlives a killed server by at most this. Renewed five times per lifetime."""
SETTLE_S = 0.3
"""A node may have checked for the pin just before it was set and started a swap. Time until that node reports
LOADING."""
LOOK_S = 0.2
"""Interval at which a request that needs the pin checks for a READY engine."""
GAP_S = 1.0
"""Gap between two pins: long enough for nodes to check the key and start the postponed swap."""
REST_S = 5.0
"""Pause before the next pin when swaps were postponed for half of max_s or more, so that they can take place."""
LOST = (NodeState.QUARANTINED, NodeState.GONE)
"""States in which an engine will not serve its version again."""


def _loads(wanted: PolicyVersion, engine: EngineInfo) -> bool:
    """Return whether `engine` has loaded `wanted`, or is about to: a node's detail ends with what it loads."""
    return engine.version == wanted or engine.detail.rpartition(" ")[2] == wanted.label


class PinLost(ForayError):
    """The version of an evaluation can no longer be held, so its remaining episodes cannot run."""


class EvaluationPin:
    """Holds one version while at least one request on this server needs it.

    max_s      maximum time that overlapping evaluations may postpone the weight swaps of training engines
    wait_s     timeout for a READY engine
    tokenizer  fingerprint of the server's tokenizer; engines that report another one are ignored
    """

    def __init__(
        self, redis: RedisClient, fleet: Fleet, stats: Stats, *, max_s: float, wait_s: float, tokenizer: str = ""
    ) -> None:
        self._redis, self._fleet, self._stats = redis, fleet, stats
        self._max_s, self._wait_s, self._tokenizer = max_s, wait_s, tokenizer
        self._holders: set[asyncio.Future[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # the last holder must not remove the key that the next one has just set
        self._still_since: float | None = None
        """When the weight swaps of training engines were first postponed, across pins that follow each other
        closely."""
        self._free_at = -math.inf
        """When the key of the last pin was removed, or will have expired."""
        self._eval_engines = self._used = False
        self._wanted: PolicyVersion | None = None
        """The version that the first holder asked for; None: any."""
        self._why = ""
        """Why the version was lost."""
        self._others_at = -PIN_MS / 1000
        """When the key was last seen to belong to another server."""
        stats.gauges["pinned_evaluations"] = self._waited_for

    @property
    def version(self) -> PolicyVersion | None:
        """The pinned version."""
        return self._fleet.pin

    def _waited_for(self) -> int:
        """Return the number of requests for which training engines postpone new weights."""
        return len(self._holders) if self.version is not None and not self._eval_engines else 0

    def confirms(self, labels: Collection[str]) -> bool:
        """Return whether an episode sampled at the versions `labels` was sampled at the pinned version only.

        After the first such episode the pinned version is final.
        """
        fits = self.version is None or set(labels) <= {self.version.label}
        self._used = self._used or (fits and bool(labels))
        return fits

    @asynccontextmanager
    async def hold(self, wanted: PolicyVersion | None = None) -> AsyncIterator[asyncio.Future[None]]:
        """Hold the pin inside the block. The future fails with PinLost if the version is lost meanwhile.

        wanted  the version to hold; None: any
        Raises RedisUnavailable when the pin cannot be set, PinLost when no engine becomes READY (at `wanted`).
        """
        lost = asyncio.get_running_loop().create_future()
        self._holders.add(lost)
        try:
            async with self._changing:
                if self._keeping is None:
                    await self._begin(wanted)
                    self._keeping = asyncio.create_task(self._keep(), name="evaluation-pin")
                elif self._keeping.done():
                    raise PinLost(self._why)  # for its remaining holders; the next request gets a new pin
                elif wanted not in (None, self.version):
                    raise PinLost(f"another evaluation holds version {self.version and self.version.label}")
            yield lost
        finally:
            self._holders.discard(lost)
            if lost.done():
                lost.exception()  # retrieved, so that asyncio does not warn
            async with self._changing:
                if not self._holders:
                    if self._keeping is not None:
                        self._keeping.cancel()
                        self._keeping = None
                    await self._end()

    async def _begin(self, wanted: PolicyVersion | None) -> None:
        """Set the pin once an engine is READY, and choose the version.

        Not before: an engine that must load its first version would wait for the evaluation, and the evaluation for the
        engine. A wanted version is pinned at once, because it does not keep engines from loading it.
        """
        self._wanted = wanted
        await self._let_swap()
        deadline = time.monotonic() + self._wait_s
        if wanted is not None:
            await self._arrive(wanted, deadline)
            return
        while True:
            self._fleet.install(await self._fleet.read())
            if self._choose():
                await self._set()
                await asyncio.sleep(SETTLE_S)
                self._fleet.install(await self._fleet.read())
                if self._choose():
                    self._used = False
                    return
                await self._end()  # all of them have just started to load
            if time.monotonic() > deadline:
                raise PinLost(f"no engine became ready within {self._wait_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _arrive(self, wanted: PolicyVersion, deadline: float) -> None:
        """Pin `wanted`, and wait until an engine has loaded it."""
        here_at = time.monotonic()
        try:
            while True:
                table, now = await self._fleet.read(), time.monotonic()
                self._fleet.install(table)
                there = [e for e in table.engines.values() if e.state not in LOST]
                self._eval_engines = any(e.role == "eval" for e in there)
                await self._set()
                serving = [e for e in there if not self._eval_engines or e.role == "eval"]
                if any(e.state is NodeState.READY and e.version == wanted for e in serving) and self._choose():
                    self._used = False
                    return
                if serving and all(e.version > wanted for e in serving):
                    raise PinLost(f"the engines hold later versions than {wanted.label}")
                # until it is the target's turn to change, every engine is on its way to the version
                if table.target is None or table.target <= wanted or any(map(partial(_loads, wanted), serving)):
                    here_at = now
                elif now > here_at + PIN_MS / 1000:
                    raise PinLost(f"no engine loads version {wanted.label} any more")
                if now > deadline:
                    raise PinLost(f"no engine held version {wanted.label} within {self._wait_s:g} s")
                await asyncio.sleep(LOOK_S)
        except BaseException:
            await self._end()
            raise

    async def _let_swap(self) -> None:
        """Pause if swaps were postponed for long, so that each pin may last for at least half of max_s.

        The postponement ends after a gap of GAP_S, or when all engines hold the newest version.
        """
        if self._still_since is None:
            return
        self._fleet.install(await self._fleet.read())
        if self._swaps_wait():
            if self._left_s() < self._max_s / 2:
                await asyncio.sleep(max(0.0, self._free_at + REST_S - time.monotonic()))
            if time.monotonic() < self._free_at + GAP_S:
                return
        self._still_since = None

    def _swaps_wait(self) -> bool:
        """Return whether a training engine does not hold the newest version."""
        table = self._fleet.table
        return table.target is not None and any(
            engine.role == "rollout" and engine.version != table.target and engine.state not in LOST
            for engine in table.engines.values()
        )

    def _left_s(self) -> float:
        """Return for how many more seconds swaps may be postponed; infinite if only engines of role `eval` are."""
        if self._eval_engines:
            return math.inf
        if self._still_since is None:
            self._still_since = time.monotonic()
        return self._still_since + self._max_s - time.monotonic()

    def _choose(self) -> bool:
        """Choose the version that most READY engines have (ties: the newest). Return False when no engine is READY (at
        the wanted version)."""
        ready = self._fleet.table.pinned(self._tokenizer, self._wanted)
        found = Counter(engine.version for engine in ready)
        if not found:
            return False
        if self._wanted is None:
            self._eval_engines = ready[0].role == "eval"
        self._fleet.pin = max(found, key=lambda version: (found[version], version))
        return True

    async def _keep(self) -> None:
        try:
            self._lose(await self._renew())
        except ForayError as error:  # a retry does not help, e.g. when Redis denies access to the key
            self._lose(str(error))

    async def _renew(self) -> str:
        """Consume the engine table; produce a pin that does not expire; wait a fifth of its lifetime.

        Ended by cancellation, or when the version is lost (no engine holds it, or it was held for too long): returns
        the reason.
        """
        backoff = Backoff("renewing the evaluation pin", self._stats.waits, longest_s=PIN_MS / 5000)
        there_at = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, min(PIN_MS / 5000, self._left_s())))
            now = time.monotonic()
            if self._is_there() or (not self._used and self._choose()):
                there_at = now
            elif now > there_at + PIN_MS / 1000:
                return f"no engine holds version {self.version and self.version.label} any more"
            if self._left_s() <= 0:
                return (
                    f"engines kept their version for {self._max_s:g} s (rollout.pin_max_s), and training must continue"
                )
            try:
                await self._set()
            except RedisUnavailable as error:
                await backoff.sleep(error)
            else:
                backoff.reset()

    def _is_there(self) -> bool:
        return any(e.version == self.version and e.state not in LOST for e in self._fleet.table.engines.values())

    def _lose(self, why: str) -> None:
        log.warning("ending an evaluation: %s", why)
        self._why = why
        for holder in self._holders:
            holder.set_exception(PinLost(why))

    async def _set(self) -> None:
        value = VersionPin(self._stats.id, self._eval_engines, self._wanted)
        key = self._redis.keys.evaluation
        before, _ = await self._redis.batch(("GET", key), ("SET", key, str(value), "PX", PIN_MS), atomic=True)
        if before is not None and not self._is_ours(before):
            self._others_at = time.monotonic()

    def _is_ours(self, raw: bytes) -> bool:
        pin = VersionPin.parse(raw)
        return pin is not None and pin.holder == self._stats.id

    async def _end(self) -> None:
        """Release the pin. If another server's pin was seen recently, let the key expire instead of removing it."""
        self._fleet.pin = None
        removed = time.monotonic() > self._others_at + PIN_MS / 1000 and await self._remove()
        if not self._eval_engines:
            self._free_at = time.monotonic() + (0.0 if removed else PIN_MS / 1000)

    async def _remove(self) -> bool:
        """Remove the key if it belongs to this server. Return False if Redis is unavailable."""
        key = self._redis.keys.evaluation
        try:
            (holder,) = await self._redis.batch(("GET", key))
            if holder is not None and self._is_ours(holder):
                await self._redis.batch(("DEL", key))
        except RedisUnavailable as error:
            log.info("the evaluation pin is left to expire: %s", error)
            return False
        return True
