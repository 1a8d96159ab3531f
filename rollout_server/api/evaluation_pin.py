"""The evaluation pin: one policy version for all evaluations that run here at the same time.

A key in Redis makes nodes put off weight swaps while it lives. It holds no promise by itself (a swap may have begun,
a node may die), so the version is also chosen here: only engines that hold it serve, and what was sampled by another
is repeated. Where an engine has the role `eval`, only engines of that role stand still, and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from protocol.errors import ForayError
from protocol.keys import EVAL_ENGINES_ONLY
from protocol.messages import NodeState
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet
from rollout_server.metrics import Stats

log = logging.getLogger(__name__)

PIN_MS = 10_000
"""The pin outlives a server that dies by so much. Renewed five times as often."""
SETTLE_S = 0.3
"""A node may just have looked for the pin and begun a swap: so long until it says that it is loading."""
LOOK_S = 0.2
"""How often a request that wants the pin looks for an engine that is ready."""
GAP_S = 1.0
"""Between two pins: time enough for nodes to look at the key and to begin the swap that waits."""
REST_S = 5.0
"""The next pin waits for so long when swaps have stood still for half of max_s or more, so that they take place."""
LOST = (NodeState.QUARANTINED, NodeState.GONE)
"""An engine in such a state will not serve its version again."""


class PinLost(ForayError):
    """The version of an evaluation cannot be held (any more), so the episodes that are left have none to run at."""


class EvaluationPin:
    """Holds one version while at least one request here wants it.

    max_s      longest time that swaps of engines which train may stand still for overlapping evaluations
    wait_s     longest wait for an engine that is ready
    tokenizer  fingerprint of the server's own; engines that name another do not count
    """

    def __init__(
        self, redis: RedisClient, fleet: Fleet, stats: Stats, *, max_s: float, wait_s: float, tokenizer: str = ""
    ) -> None:
        self._redis, self._fleet, self._stats = redis, fleet, stats
        self._max_s, self._wait_s, self._tokenizer = max_s, wait_s, tokenizer
        self._holders: set[asyncio.Future[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # the last to leave must not remove what the next has just set
        self._still_since: float | None = None
        """Since when swaps of engines that train stand still, over pins that follow each other closely."""
        self._free_at = -math.inf
        """When the key of the last pin was gone."""
        self._eval_engines = self._used = False
        self._why = ""
        """Why the version was lost."""
        self._others_at = -PIN_MS / 1000
        """When the key was last seen in another server's name."""
        stats.gauges["pinned_evaluations"] = self._waited_for

    @property
    def version(self) -> PolicyVersion | None:
        """The version that is held."""
        return self._fleet.pin

    def _waited_for(self) -> int:
        """Requests for which engines that train put off new weights."""
        return len(self._holders) if self._keeping is not None and not self._eval_engines else 0

    def confirms(self, labels: Collection[str]) -> bool:
        """Whether an episode sampled at the versions `labels` is one of the version that is held.

        From the first one on, this version is the evaluation's: it is not exchanged for another one any more.
        """
        fits = self.version is None or set(labels) <= {self.version.label}
        self._used = self._used or (fits and bool(labels))
        return fits

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[asyncio.Future[None]]:
        """The pin for the time of the block. The future fails with PinLost when the version is lost meanwhile.

        Raises RedisUnavailable when the pin cannot be set, PinLost when no engine becomes ready.
        """
        lost = asyncio.get_running_loop().create_future()
        self._holders.add(lost)
        try:
            async with self._changing:
                if self._keeping is None:
                    await self._begin()
                    self._keeping = asyncio.create_task(self._keep(), name="evaluation-pin")
                elif self._keeping.done():
                    raise PinLost(self._why)  # of those who hold it still; the next request gets a new one
            yield lost
        finally:
            self._holders.discard(lost)
            if lost.done():
                lost.exception()  # seen, or asyncio would complain
            async with self._changing:
                if not self._holders:
                    if self._keeping is not None:
                        self._keeping.cancel()
                        self._keeping = None
                    await self._end()

    async def _begin(self) -> None:
        """Sets the pin once an engine is ready, and chooses the version.

        Not before: an engine that has to load its first version would wait for the end of the evaluation, and the
        evaluation for the engine.
        """
        await self._let_swap()
        deadline = time.monotonic() + self._wait_s
        while True:
            self._fleet.install(await self._fleet.read())
            if self._choose():
                await self._set()
                await asyncio.sleep(SETTLE_S)
                self._fleet.install(await self._fleet.read())
                if self._choose():
                    self._used = False
                    return
                await self._end()  # all of them have just begun to load
            if time.monotonic() > deadline:
                raise PinLost(f"no engine was ready for {self._wait_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _let_swap(self) -> None:
        """Rests where swaps have stood still for long, so that each pin may last for at least half of max_s.

        A gap of GAP_S, or engines that all hold the newest version, end the time that swaps stand still.
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
        """Whether an engine that trains does not hold the newest version."""
        table = self._fleet.table
        return table.target is not None and any(
            engine.role == "rollout" and engine.version != table.target and engine.state not in LOST
            for engine in table.engines.values()
        )

    def _left_s(self) -> float:
        """Seconds for which swaps may go on to stand still; without end where only engines of role `eval` do."""
        if self._eval_engines:
            return math.inf
        if self._still_since is None:
            self._still_since = time.monotonic()
        return self._still_since + self._max_s - time.monotonic()

    def _choose(self) -> bool:
        """Holds the version that most engines have, the newest of these; False while none is ready."""
        ready = self._fleet.table.pinned(self._tokenizer)
        found = Counter(engine.version for engine in ready)
        if not found:
            return False
        self._eval_engines = ready[0].role == "eval"
        self._fleet.pin = max(found, key=lambda version: (found[version], version))
        return True

    async def _keep(self) -> None:
        try:
            self._lose(await self._renew())
        except ForayError as error:  # what no patience mends: a Redis that denies us the key
            self._lose(str(error))

    async def _renew(self) -> str:
        """Consumes time and the engine table; produces a pin that does not lapse; waits a fifth of its life.

        Ended by cancellation, or when the version is lost (no engine holds it, or it was held for too long): says why.
        """
        backoff = Backoff("pinning the versions for an evaluation", self._stats.waits, longest_s=PIN_MS / 5000)
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
                    f"engines kept their version for {self._max_s:g} s (rollout.pin_max_s), and training has to go on"
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
        log.warning("an evaluation ends: %s", why)
        self._why = why
        for holder in self._holders:
            holder.set_exception(PinLost(why))

    async def _set(self) -> None:
        value = (EVAL_ENGINES_ONLY if self._eval_engines else "") + self._stats.id
        key = self._redis.keys.evaluation
        before, _ = await self._redis.batch(("GET", key), ("SET", key, value, "PX", PIN_MS), atomic=True)
        if before is not None and not self._is_ours(before):
            self._others_at = time.monotonic()

    def _is_ours(self, raw: bytes) -> bool:
        return raw.decode(errors="replace").removeprefix(EVAL_ENGINES_ONLY) == self._stats.id

    async def _end(self) -> None:
        """Lets go. Another server's pin must not go with ours: where one was seen lately, the key is left to lapse."""
        self._fleet.pin = None
        removed = time.monotonic() > self._others_at + PIN_MS / 1000 and await self._remove()
        if not self._eval_engines:
            self._free_at = time.monotonic() + (0.0 if removed else PIN_MS / 1000)

    async def _remove(self) -> bool:
        """Whether the key is not ours any more."""
        key = self._redis.keys.evaluation
        try:
            (holder,) = await self._redis.batch(("GET", key))
            if holder is not None and self._is_ours(holder):
                await self._redis.batch(("DEL", key))
        except RedisUnavailable as error:
            log.info("the evaluation pin is left to lapse: %s", error)
            return False
        return True
