"""The fleet: the registered engines with their versions, and the target version. Read from Redis twice a second.

The table is immutable and replaced as a whole, so a reader never sees half of a change. While Redis is unavailable the
last table stays in use: the engines still run, and generation continues.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from protocol import run_meta
from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR, decode_as
from protocol.errors import ProtocolError, UserError
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.runtime.files import lineage_of
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis.aio import Backoff, RedisClient
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.url import redacted
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)
M = TypeVar("M", EngineInfo, WeightUpdate)


class RunCompatibility:
    """Checks that this process and the learner are compatible: compares `Keys.meta` at the start and at every change.

    The lineage id in the run directory identifies the run of this process. If the directory is not readable (another
    disk), the first lineage id seen in Redis does. When a learner takes the run id over for another lineage, the
    processes of the old lineage stop: their settings, prompts and rewards may differ.

    needs  oldest schema of a learner that can train what this process sends, `SEQUENCES` with an agent
    facts  settings that must equal the learner's, by their names in `RunMeta.facts`; a different value is logged
    """

    def __init__(self, run: RunSettings, *, needs: tuple[int, int] = (SCHEMA_MAJOR, 0), **facts: object) -> None:
        self._run, self._facts = run, {name: str(value) for name, value in facts.items()}
        self._needs = needs
        try:
            self._tokenizer = run_meta.tokenizer_digest((run.model / "tokenizer.json").read_bytes())
        except OSError:
            self._tokenizer = ""  # set by the process that loads the tokenizer
        self._last: run_meta.RunMeta | None = None
        self._lineage_id = ""

    @property
    def lineage_id(self) -> str:
        """Lineage id of the run that this process works for; "" before a learner has written it."""
        return self._lineage_id

    @property
    def is_met(self) -> bool:
        """Whether a learner's meta has been read, or none is needed."""
        return self._last is not None or self._needs[1] == 0

    def check(self, raw: Mapping[bytes, bytes]) -> None:
        """Compare with the meta of the learner. Raises UserError when this process must stop.

        Called at every read of Redis. Unchanged meta is not compared again, so each difference is logged once. Missing
        meta (an older learner, or none yet) is accepted, but `is_met` is False if a minor schema is needed.
        """
        if (lineage_id := run_meta.lineage_id_of(raw)) and lineage_id != self._lineage_id:
            self._compare(raw, lineage_id)
        theirs = run_meta.parse_run_meta(raw)
        if theirs is None or theirs == self._last:
            return
        error = run_meta.incompatibility(theirs, run=self._run.id, tokenizer=self._tokenizer, needs=self._needs)
        if error is not None:
            raise error
        if theirs.schema[1] != SCHEMA_MINOR:
            log.warning(
                "the learner uses schema %d.%d and this process %d.%d. They are compatible, but upgrade the older one",
                *(*theirs.schema, SCHEMA_MAJOR, SCHEMA_MINOR),
            )
        for name, ours in self._facts.items():
            if name in theirs.facts and theirs.facts[name] != ours:
                log.warning("run.%s is %s in this process and %s in the learner", name, ours, theirs.facts[name])
        self._last = theirs

    def _compare(self, raw: Mapping[bytes, bytes], lineage_id: str) -> None:
        """Compare a lineage id that is new in Redis with the one of this process. Raises UserError if they differ."""
        run = self._run
        ours = lineage_of(run.dir)
        if (ours or self._lineage_id or lineage_id) != lineage_id:
            whose = f"{run.dir.absolute()}, lineage {ours[:8]}" if ours else f"lineage {self._lineage_id[:8]}"
            raise _elsewhere(raw, run, whose)
        self._lineage_id = lineage_id


def _elsewhere(raw: Mapping[bytes, bytes], run: RunSettings, whose: str) -> UserError:
    return run_meta.another_run_error(
        raw,
        run=run.id,
        redis=redacted(run.redis_url),
        ours=whose,
        todo="to join the run in Redis (a learner may have taken it over), restart this process with that run's "
        "configuration and run.dir; otherwise set another run.id in all processes of your run",
    )


@dataclass(frozen=True)
class FleetTable:
    """The last state read from Redis. `target` None: no learner has published yet. `done`: the run is over."""

    engines: dict[str, EngineInfo] = field(default_factory=dict)
    target: PolicyVersion | None = None
    done: bool = False

    def routable(self, engine: EngineInfo, *, max_lag: int, tokenizer: str = "") -> bool:
        """Return whether `engine` may get training requests: READY, current epoch, at most `max_lag` steps behind.

        tokenizer  fingerprint of the rollout server's tokenizer; an engine with another one would read other text
        """
        return not self.unroutable_reason(engine, max_lag=max_lag, tokenizer=tokenizer)

    def unroutable_reason(self, engine: EngineInfo, *, max_lag: int, tokenizer: str = "") -> str:
        """Return why `engine` gets no training requests, in a few words; "" if it may."""
        if not same_tokenizer(engine, tokenizer):
            return "a different tokenizer"
        if engine.role != "rollout":
            return f"reserved for role {engine.role}"
        if engine.state is not NodeState.READY:
            return str(engine.state)
        if self.target is None:
            return "no target version yet"
        if engine.epoch != self.target.epoch:
            return f"epoch {engine.epoch}, target epoch {self.target.epoch}"
        behind = self.target.step - engine.step
        return f"{behind} steps behind, at most {max_lag} allowed" if behind > max_lag else ""

    def pinned(self, tokenizer: str = "", version: PolicyVersion | None = None) -> list[EngineInfo]:
        """Return the engines for evaluation at `version`: those with role `eval`, or all READY ones if none has it."""
        ready = [e for e in self.engines.values() if e.state is NodeState.READY and same_tokenizer(e, tokenizer)]
        if version is not None:
            ready = [e for e in ready if e.version == version]
        return [e for e in ready if e.role == "eval"] or ready


def same_tokenizer(engine: EngineInfo, tokenizer: str) -> bool:
    """Return False only if both sides report a tokenizer and the fingerprints differ."""
    return not (engine.tokenizer and tokenizer) or engine.tokenizer == tokenizer


class Fleet:
    """Keeps `table` up to date. `changed()` wakes coroutines that wait for an engine."""

    def __init__(
        self, redis: RedisClient, waits: WaitTimer, *, poll_s: float, compatibility: RunCompatibility | None = None
    ) -> None:
        self._redis, self._waits, self._poll_s, self._compatibility = redis, waits, poll_s, compatibility
        self.table = FleetTable()
        self.pin: PolicyVersion | None = None
        """Pinned version of evaluations (`rollout_server.api.evaluation_pin`). None: any."""
        self.read_at = -math.inf
        """Monotonic time of the last answer from Redis."""
        self.listeners: list[Callable[[FleetTable], None]] = []
        """Called with the table after every read, changed or not. Must not raise."""
        self._changed = asyncio.Event()
        self._garbage: set[str] = set()

    @property
    def looked(self) -> bool:
        """Whether Redis has answered at least once and the learner's meta is compatible."""
        return self.read_at > -math.inf

    async def follow(self) -> None:
        """Consume registrations and the target in Redis; produce `table`; wait poll_s; ended by cancellation."""
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
        """Read the table from Redis. Raises RedisUnavailable, or UserError when the learner's meta is not compatible.

        Entries that cannot be decoded are skipped and logged once.
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
        """Replace the table, and wake waiting coroutines if anything relevant for routing changed."""
        before, self.table, self.read_at = self.table, table, time.monotonic()
        if _routing(before) != _routing(table):
            self._changed.set()
            self._changed = asyncio.Event()
        for listener in self.listeners:
            listener(table)

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change of the table, or after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _decode(self, kind: type[M], raw: bytes | None, where: str) -> M | None:
        if raw is None:
            return None  # the registration expired between the two reads, or there is no target yet
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
