"""The fleet: which engines there are, at which version, and which version is wanted. Read from Redis, twice a second.

The table is a frozen value that is replaced whole, so a reader never sees half of a change. When Redis is away the
last table stays: the engines are still there, and generation goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR, decode_as
from protocol.errors import ProtocolError, UserError
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.run_meta import (
    LINEAGE_FILE,
    RunMeta,
    another_run_error,
    incompatibility,
    lineage_id_in,
    lineage_id_of,
    parse_run_meta,
    tokenizer_digest,
)
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.url import redacted
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)
M = TypeVar("M", EngineInfo, WeightUpdate)


class RunCompatibility:
    """Whether this process and the learner can work together: `Keys.meta`, compared at the start and at every change.

    Which run this process belongs to is said by the lineage id in its run directory; where it can read none (another
    disk), by the first one that it sees in Redis. A learner that takes the run over for another lineage thus ends the
    processes of the one before: their settings, prompts and rewards are not its own.

    facts  settings that should be the learner's, by their names in `RunMeta.facts`; another value is logged
    """

    def __init__(self, run: RunSettings, **facts: object) -> None:
        self._run, self._facts = run, {name: str(value) for name, value in facts.items()}
        try:
            self._tokenizer = tokenizer_digest((run.model / "tokenizer.json").read_bytes())
        except OSError:
            self._tokenizer = ""  # reported where the tokenizer is loaded
        self._last: RunMeta | None = None
        self._lineage_id = ""

    @property
    def lineage_id(self) -> str:
        """Which run this process works for; "" while no learner has said so."""
        return self._lineage_id

    def check(self, raw: Mapping[bytes, bytes]) -> None:
        """Compare with what the learner wrote; raises UserError when this process must not go on.

        Called at every look at Redis: only what is new is compared, and so logged once. No meta is an older learner
        (or none yet), and fine.
        """
        if (lineage_id := lineage_id_of(raw)) and lineage_id != self._lineage_id:
            self._compare(raw, lineage_id)
        theirs = parse_run_meta(raw)
        if theirs is None or theirs == self._last:
            return
        error = incompatibility(theirs, run=self._run.id, tokenizer=self._tokenizer)
        if error is not None:
            raise error
        if theirs.schema[1] != SCHEMA_MINOR:
            log.warning(
                "the learner writes schema %d.%d, this process %d.%d: they can read each other; upgrade the older one",
                *(*theirs.schema, SCHEMA_MAJOR, SCHEMA_MINOR),
            )
        for name, ours in self._facts.items():
            if name in theirs.facts and theirs.facts[name] != ours:
                log.warning("run.%s is %s here and %s at the learner", name, ours, theirs.facts[name])
        self._last = theirs

    def _compare(self, raw: Mapping[bytes, bytes], lineage_id: str) -> None:
        """Compare a lineage in Redis that is new to this process with its own. Raises UserError."""
        run = self._run
        try:
            ours = lineage_id_in((run.dir / LINEAGE_FILE).read_text(errors="replace"))
        except OSError:
            ours = ""
        if (ours or self._lineage_id or lineage_id) != lineage_id:
            whose = f"{run.dir.absolute()}, lineage {ours[:8]}" if ours else f"lineage {self._lineage_id[:8]}"
            raise _elsewhere(raw, run, whose)
        self._lineage_id = lineage_id


def _elsewhere(raw: Mapping[bytes, bytes], run: RunSettings, whose: str) -> UserError:
    return another_run_error(
        raw,
        run=run.id,
        redis=redacted(run.redis_url),
        ours=whose,
        todo="to work for the run in Redis (a learner may have taken it over), start this process again with that "
        "run's configuration and run.dir; else give your run another run.id, for all of its processes",
    )


@dataclass(frozen=True)
class FleetTable:
    """What Redis said last. `target` None: no learner has published yet. `done`: the run is over."""

    engines: dict[str, EngineInfo] = field(default_factory=dict)
    target: PolicyVersion | None = None
    done: bool = False

    def routable(self, engine: EngineInfo, *, max_lag: int, tokenizer: str = "") -> bool:
        """Whether training traffic may go to `engine`: READY, of the current epoch, at most `max_lag` steps behind.

        tokenizer  fingerprint of the rollout server's own; an engine that names another would be fed other words
        """
        return not self.unroutable_reason(engine, max_lag=max_lag, tokenizer=tokenizer)

    def unroutable_reason(self, engine: EngineInfo, *, max_lag: int, tokenizer: str = "") -> str:
        """Why `engine` gets no training traffic, in a few words; "" when it may."""
        if not same_tokenizer(engine, tokenizer):
            return "another tokenizer"
        if engine.role != "rollout":
            return f"for {engine.role} only"
        if engine.state is not NodeState.READY:
            return str(engine.state)
        if self.target is None:
            return "no version is wanted yet"
        if engine.epoch != self.target.epoch:
            return f"of epoch {engine.epoch}, not {self.target.epoch}"
        behind = self.target.step - engine.step
        return f"{behind} steps behind, {max_lag} are allowed" if behind > max_lag else ""

    def pinned(self, tokenizer: str = "", version: PolicyVersion | None = None) -> list[EngineInfo]:
        """Engines for evaluation: those with the role, or any READY one where none has it; only those at `version`."""
        ready = [e for e in self.engines.values() if e.state is NodeState.READY and same_tokenizer(e, tokenizer)]
        if version is not None:
            ready = [e for e in ready if e.version == version]
        return [e for e in ready if e.role == "eval"] or ready


def same_tokenizer(engine: EngineInfo, tokenizer: str) -> bool:
    """False only where both sides name a tokenizer and the names differ."""
    return not (engine.tokenizer and tokenizer) or engine.tokenizer == tokenizer


class Fleet:
    """Keeps `table` fresh. `changed()` wakes those who wait for an engine."""

    def __init__(
        self, redis: RedisClient, waits: WaitTimer, *, poll_s: float, compatibility: RunCompatibility | None = None
    ) -> None:
        self._redis, self._waits, self._poll_s, self._compatibility = redis, waits, poll_s, compatibility
        self.table = FleetTable()
        self.pin: PolicyVersion | None = None
        """The version that evaluations run at (`rollout_server.api.evaluation_pin`). None: any."""
        self.read_at = -math.inf
        """When Redis answered last, by the monotonic clock."""
        self.listeners: list[Callable[[FleetTable], None]] = []
        """Called with the table at every read, whether or not it changed. Must not raise."""
        self._changed = asyncio.Event()
        self._garbage: set[str] = set()

    @property
    def looked(self) -> bool:
        """Whether Redis has answered at all, and the learner's meta fits ours."""
        return self.read_at > -math.inf

    async def follow(self) -> None:
        """Consumes registrations and the target in Redis; produces `table`; waits poll_s; ended by cancellation."""
        backoff = Backoff("reading the engine table", self._waits)
        while True:
            try:
                table = await self.read()
            except RedisUnavailable as error:
                await backoff.sleep(error)
                continue
            backoff.reset()
            self.install(table)
            await asyncio.sleep(self._poll_s)

    async def read(self) -> FleetTable:
        """One look at Redis; raises RedisUnavailable, and UserError when the learner's meta does not fit ours.

        Entries that do not decode are left out and logged once.
        """
        keys = self._redis.keys
        now = await self._redis.now()
        ids, (target, state), meta = await self._redis.batch(
            ("ZRANGEBYSCORE", keys.engines, now, "+inf"), ("HMGET", keys.target, "b", "state"), ("HGETALL", keys.meta)
        )
        if self._compatibility is not None:
            self._compatibility.check(meta)
        names = [raw.decode(errors="replace") for raw in ids]
        bodies = await self._redis.batch(*(("HGET", keys.engine(name), "b") for name in names))
        engines = {}
        for name, body in zip(names, bodies, strict=True):
            info = self._decode(EngineInfo, body, name)
            if info is not None:
                engines[name] = info
        update = self._decode(WeightUpdate, target, keys.target)
        return FleetTable(engines, update.version if update else None, state == b"done")

    def install(self, table: FleetTable) -> None:
        """Replace the table and wake those who wait when anything that routing looks at is different."""
        before, self.table, self.read_at = self.table, table, time.monotonic()
        if _routing(before) != _routing(table):
            self._changed.set()
            self._changed = asyncio.Event()
        for listener in self.listeners:
            listener(table)

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of the table, or after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _decode(self, kind: type[M], raw: bytes | None, where: str) -> M | None:
        if raw is None:
            return None  # a registration that lapsed between the two reads, or no target yet
        try:
            return decode_as(kind, raw)
        except ProtocolError as error:
            if where not in self._garbage:
                self._garbage.add(where)
                log.warning("ignoring %s: %s: %s", where, error.reason, error)
            return None


def _routing(table: FleetTable) -> object:
    engines = {e.id: (e.url, e.state, e.version, e.incarnation, e.role) for e in table.engines.values()}
    return engines, table.target, table.done
