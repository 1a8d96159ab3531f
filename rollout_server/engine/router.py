"""The router: chooses the engine for each turn and handles failover. Implements `Generate`.

Without failures a turn is one request. If its engine fails, stalls, drains or is removed from the engine table, the
received tokens are kept with their log-probs and versions, and another engine continues from exactly these tokens. Only
the output of a request with malformed data is dropped and sampled again.

    a call      TurnAssembler.remaining_request() --> RequestQueue.acquire() --> pick_engine()
                --> SglangClient.stream() --> TurnAssembler.add() --> complete? else again
    the table   ends calls at engines that may no longer be used, adjusts the limits, dispatches the queue

With E engines, a turn costs O(log E): `EngineIndex` holds the engines that may get requests. A new table (twice a
second) and an ejection cost O(E log E), a table also O(calls in flight), a failed request O(E).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.messages import EngineInfo, NodeState
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.timing import PATIENCE
from protocol.runtime.tracing import span
from rollout_server.dispatch.fleet import Fleet, FleetTable, same_tokenizer
from rollout_server.engine.admission import InflightTracker, RequestQueue, Shortage, incarnation_key
from rollout_server.engine.base import FAULTS, TOO_MANY_FILES, Completion, EngineError, GenerateRequest
from rollout_server.engine.client import STREAM_INTERVAL, EngineCall
from rollout_server.engine.continuation import StopChecker, TurnAssembler
from rollout_server.engine.decoding import ReceivedTokens
from rollout_server.engine.health import EngineHealth, RateLimitedLog
from rollout_server.engine.selection import Candidate, EngineIndex, Place, Work, pick_engine

REMEMBERED = 65_536
"""Maximum number of sessions and groups whose engine is remembered. Forgetting one costs a prefill."""
LEAST_LEARNT = 8
"""Minimum number of tokens of a request from which an engine's speed is learnt."""
LEAST_BACKLOG = 16
"""Minimum number of waiting turns for backpressure, however small the limits are."""

UNUSABLE = frozenset({NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.GONE})
"""States of an engine that sends no more tokens: its turns continue at another engine at once."""
SILENT = frozenset({NodeState.LOADING, NodeState.SYNCING})
"""States in which an engine may pause its turns."""
FREE_RETRIES = frozenset({"unreachable", "cut", "aborted", "withdrawn", TOO_MANY_FILES})
"""Causes that do not count as an attempt of the turn: the engine is gone, and it or another will be available."""
FILES_PAUSE_S = 1.0
"""Pause of a turn after this process had no file descriptor for it."""
HUNG = "no data on any request"
"""Detail of the error of calls that end because another one has timed out: that one is the engine's strike."""

COUNTERS = ("failovers", "tokens_continued", "tokens_unattributed", "tokens_discarded")
"""failovers: additional requests of turns. Tokens received by a request that failed: kept (tokens_continued), dropped
because their version is unknown (tokens_unattributed), dropped because the engine sent malformed data
(tokens_discarded)."""


class EngineClient(Protocol):
    """The part of an engine client that the router uses."""

    async def stream(self, request: GenerateRequest, call: EngineCall, *, version: str) -> None: ...


@dataclass(frozen=True)
class TurnLimits:
    """Limits of one turn.

    timeout_s  for a request to one engine, or more if its steps are slow (`EngineCall`)
    stall_s    between two chunks of its answer, or more if its steps are slow
    interval   tokens per chunk
    attempts   maximum number of requests that fail because of the engine
    wait_s     maximum wait while no engine is usable
    """

    timeout_s: float = 120.0
    stall_s: float = 20.0
    interval: int = STREAM_INTERVAL
    attempts: int = 4
    wait_s: float = 600.0


class Router:
    """Generate turns with the engines of a fleet: `await router(request)`.

    connect       returns a client for an engine
    waits         receives the seconds spent waiting for an engine
    max_lag       steps behind the target beyond which an engine gets no request (`rollout.max_engine_lag`)
    limits        timeouts in seconds, attempts and tokens per chunk of one turn
    stop_checker  detects the end of a turn in its tokens; None: rely on the engines
    adaptive      whether to limit the requests in flight at each engine (`AimdLimit`)
    vocab_size    refuse requests with larger token ids; None: do not check
    tokenizer     fingerprint that engines must have; "": any
    counts        receives COUNTERS and `engine_<cause>` (errors by cause)
    """

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[EngineInfo], EngineClient],
        waits: WaitTimer,
        *,
        max_lag: int,
        limits: TurnLimits,
        stop_checker: StopChecker | None = None,
        adaptive: bool = True,
        vocab_size: int | None = None,
        tokenizer: str = "",
        counts: Counter[str] | None = None,
    ) -> None:
        self._fleet, self._connect, self._limits, self._stop_checker = fleet, connect, limits, stop_checker
        self._max_lag, self._vocab_size, self._tokenizer = max_lag, vocab_size, tokenizer
        self.counts: Counter[str] = Counter() if counts is None else counts
        # a rate needs the value before the first failure
        self.counts.update(dict.fromkeys((*COUNTERS, *(f"engine_{cause}" for cause in FAULTS)), 0))
        self.health, self.inflight = EngineHealth(), InflightTracker(adaptive=adaptive)
        self._adaptive = adaptive
        self._queue = RequestQueue(self._try_acquire, self._release, self._shortage, waits, wait_s=limits.wait_s)
        self._log = RateLimitedLog()
        self._calls: dict[EngineCall, tuple[EngineInfo, bool]] = {}
        """call in flight -> (engine when the request was sent, pinned)"""
        self._engine_of: OrderedDict[str, str] = OrderedDict()
        """s:<session> or g:<group> -> engine id, least recently used first"""
        self._turns: dict[str, tuple[TurnAssembler, EngineCall | None]] = {}
        """session -> its turn in progress, and the call in flight"""
        self._suspects: set[str] = set()
        """keys of the engines whose younger calls `_abort_hung` looks at later"""
        self._indexes: dict[bool, EngineIndex] = {}
        """pinned -> the engines that may get a request now; without an entry, it is built when it is needed"""
        fleet.listeners.append(self._on_table)
        self._on_table(fleet.table)

    async def __call__(self, request: GenerateRequest) -> Completion:
        """Return the turn for `request`, continued at other engines where one failed.

        Raises EngineError when no engine could generate it: after `limits.attempts` failures of engines,
        `limits.wait_s` without a usable one, or at once for an invalid request (cause `refused`).
        """
        if self._vocab_size is not None and max(request.ids, default=0) >= self._vocab_size:
            # SGLang 0.5.23 crashes on such an id, and the next engine would too
            raise EngineError("refused", detail=f"a token id is outside the vocabulary of {self._vocab_size}")
        turn = TurnAssembler(request, self._stop_checker)
        self._turns[request.session] = turn, None
        try:
            return await self._complete(request, turn)
        finally:
            self._turns.pop(request.session, None)

    async def _complete(self, request: GenerateRequest, turn: TurnAssembler) -> Completion:
        """Send requests until the turn is complete. Raises EngineError."""
        failures: dict[str, int] = {}
        attempts = 0
        give_up_at = time.monotonic() + self._limits.wait_s
        while True:
            rest = turn.remaining_request()
            asked, unusable = time.monotonic(), bool(failures) and not self._index(request.pinned).engines
            engine = await self._acquire_engine(rest, failures)
            if not unusable:  # then the time went by in the queue for capacity
                give_up_at += time.monotonic() - asked
            received, error = await self._attempt(engine, rest, turn)
            if error is not None and error.cause == "refused":
                raise error  # the request itself is invalid: every engine would reject it
            kept = self._account(engine, turn, received, error)
            completion = turn.completion()
            if completion is not None:
                self.inflight.learn_length(len(turn.ids))
                return completion
            attempts += error is None or error.cause not in FREE_RETRIES
            if kept:
                give_up_at = time.monotonic() + self._limits.wait_s
            if attempts >= self._limits.attempts or time.monotonic() > give_up_at:
                raise error or EngineError("bad_output", engine.id, "its weights changed during every attempt")
            self.counts["failovers"] += 1
            if error is not None and error.cause == TOO_MANY_FILES:
                await asyncio.sleep(FILES_PAUSE_S)
                continue
            failures[engine.id] = failures.get(engine.id, 0) + 1

    def candidates(self, *, pinned: bool) -> list[EngineInfo]:
        """Return the engines that may get a request now, with or without capacity."""
        return list(self._index(pinned).engines.values())

    def _index(self, pinned: bool) -> EngineIndex:
        """Return the current index of training, or of evaluation."""
        index, pin = self._indexes.get(pinned), self._fleet.pin if pinned else None
        if index is None or index.pin != pin or time.monotonic() >= index.until:
            table = self._fleet.table
            if pinned:
                allowed = table.pinned(self._tokenizer, self._fleet.pin)
            else:
                every = table.engines.values()
                allowed = [e for e in every if table.routable(e, max_lag=self._max_lag, tokenizer=self._tokenizer)]
            usable = [e for e in allowed if self.health.usable(incarnation_key(e))]
            out = {incarnation_key(e) for e in allowed}.difference(map(incarnation_key, usable))
            until = min(map(self.health.ejected_until, out), default=math.inf)
            index = self._indexes[pinned] = EngineIndex(usable, self._place, pin=pin, until=until)
        return index

    def _place(self, engine: EngineInfo) -> Place | None:
        """Return the place of an engine in the order by pace; None if it has no capacity."""
        if not self.inflight.has_capacity(engine):
            return None
        return self.inflight.pace(engine), self.inflight.load(engine), engine.running + engine.waiting, engine.id

    def unroutable_reason(self, engine: EngineInfo) -> str:
        """Return why `engine` gets no training requests now; "" if it does."""
        why = self._fleet.table.unroutable_reason(engine, max_lag=self._max_lag, tokenizer=self._tokenizer)
        return why or ("" if self.health.usable(incarnation_key(engine)) else "ejected after errors")

    def turn_so_far(self, session: str) -> tuple[str, list[int]] | None:
        """Return (engine, tokens received so far) of the turn in progress; engine "" while it waits for one.

        None if no turn of `session` is in progress. Tokens may disappear again: of an engine that sends malformed data,
        or after the end of a continued turn.
        """
        turn, call = self._turns.get(session, (None, None))
        if turn is None:
            return None
        return ("", turn.ids) if call is None else (call.received.engine, [*turn.ids, *call.tokens_so_far()])

    def count_so_far(self, session: str) -> tuple[str, int] | None:
        """Return the same with the number of tokens in their place. Decodes nothing: a list asks for every session."""
        turn, call = self._turns.get(session, (None, None))
        if turn is None:
            return None
        engine, decoder = (call.received.engine, call.decoder) if call is not None else ("", None)
        return engine, len(turn.ids) + (decoder.count() if decoder is not None else 0)

    @property
    def waiting(self) -> int:
        """Number of turns that wait for an engine."""
        return self._queue.waiting(pinned=False) + self._queue.waiting(pinned=True)

    def backpressure(self) -> bool:
        """Return whether more turns wait than half of all limits, so that a new group would have to wait too.

        Evaluations count only if they use the same engines as training.
        """
        if not self._adaptive:
            return False
        limits = sum(self.inflight.limit(e) or 0 for e in self.candidates(pinned=False))
        waiting = self._queue.waiting(pinned=False) if self._shortage(True) == "eval" else self.waiting
        return waiting > max(LEAST_BACKLOG, limits // 2)

    async def _acquire_engine(self, request: GenerateRequest, failures: Mapping[str, int]) -> EngineInfo:
        """Take capacity and return the engine's current table entry. Raises EngineError("no_engine")."""
        while True:
            taken = await self._queue.acquire(request, failures)
            engine = self._index(request.pinned).engines.get(taken.id)
            if engine is not None and engine.incarnation == taken.incarnation:
                return engine
            self._release(taken, request)  # the table has changed meanwhile

    def _try_acquire(
        self, request: GenerateRequest, failures: Mapping[str, int], *, returning: bool
    ) -> EngineInfo | None:
        """Take capacity, or return None. `returning`: only at the engine with the prefix, if it has not failed."""
        inflight, index = self.inflight, self._index(request.pinned)
        names = f"s:{request.session}", f"g:{request.group}"
        usual = [self._engine_of.get(name, "") for name in names]
        own = "" if failures.get(usual[0]) else usual[0]
        found = {
            name: engine
            for name in ((own,) if returning else (*usual, *index.fastest(failures)))
            if (engine := index.engines.get(name)) and inflight.has_capacity(engine, returning=name == own)
        }
        if not found:
            return None
        candidates = [
            Candidate(e.id, inflight.load(e), e.running + e.waiting, failures.get(e.id, 0), inflight.pace(e))
            for e in found.values()
        ]
        chosen = pick_engine(candidates, usual, Work(len(request.ids), inflight.turn_tokens))
        for name in names:
            self._engine_of[name] = chosen
            self._engine_of.move_to_end(name)
            if len(self._engine_of) > REMEMBERED:
                self._engine_of.popitem(last=False)
        inflight.add(found[chosen], size_of(request))
        self._reorder(chosen)
        return found[chosen]

    def _reorder(self, name: str) -> None:
        for index in self._indexes.values():
            index.update(name)

    def _release(self, engine: EngineInfo, request: GenerateRequest) -> None:
        self.inflight.remove(engine, size_of(request))
        self._reorder(engine.id)
        self._queue.dispatch()

    def _shortage(self, pinned: bool) -> Shortage:
        first = next(iter(self._index(pinned).engines.values()), None)
        if first is None:
            return "engine"
        return "eval" if first.role == "eval" else "window"

    async def _attempt(
        self, engine: EngineInfo, request: GenerateRequest, turn: TurnAssembler
    ) -> tuple[ReceivedTokens, EngineError | None]:
        """Send one request. Return the received tokens, and the error that ended the request, if any."""
        received = ReceivedTokens(
            engine.id,
            request.max_new_tokens,
            vocab_size=self._vocab_size,
            label=engine.version.label,
            # an engine reports the version of its weights, not that of the adapter
            fixed=engine.version if engine.adapter else None,
        )
        call = EngineCall(
            received,
            timeout_s=self._limits.timeout_s,
            stall_s=self._limits.stall_s,
            pace_s=lambda: self._pace_s(engine),
            interval=self._limits.interval,
            may_pause=lambda: self._is_in(engine, SILENT),
            # an engine cannot detect a stop string that started before its first token
            should_end=(lambda: turn.ends_within(received.ids)) if turn.ids else None,
        )
        self._calls[call], began = (engine, request.pinned), time.monotonic()
        self._turns[request.session] = turn, call
        with span("engine request", engine=engine.id, version=engine.version.label) as traced:
            try:
                await self._connect(engine).stream(request, call, version=engine.version.label)
                self._learn(engine, call)
            except EngineError as error:
                traced.fail(error.cause)
                return received, error
            finally:
                del self._calls[call]
                self._turns[request.session] = turn, None
                self._release(engine, request)
                self.counts["engine_ms"] += 0 if request.pinned else round(1000 * (time.monotonic() - began))
                traced.set(tokens=len(received.ids))
        return received, None

    def _learn(self, engine: EngineInfo, call: EngineCall) -> None:
        """Learn the engine's speed from a request that has ended well, unless the engine paused for new weights."""
        now, tokens = self._fleet.table.engines.get(engine.id), len(call.received.ids) - 1
        seconds = call.last_data_at - call.first_data_at
        if now is not None and now.version == engine.version and tokens >= LEAST_LEARNT and seconds > 0:
            self.inflight.learn(engine, tokens, seconds)

    def _account(
        self, engine: EngineInfo, turn: TurnAssembler, received: ReceivedTokens, error: EngineError | None
    ) -> int:
        """Add the received tokens to the turn, and record success or failure of the engine. Return the tokens added."""
        key, cause = incarnation_key(engine), error.cause if error else ""
        kept = len(received.ids)
        if cause == "bad_output":
            # the earlier tokens of a request with malformed data may be wrong too
            self.counts["tokens_discarded"] += kept
            kept = 0
        else:
            unsure = turn.add(received)
            self.counts["tokens_unattributed"] += unsure
            kept -= unsure
        if error is None:
            self.health.succeeded(key)
            return kept
        self.counts[f"engine_{cause}"] += 1
        self.counts["tokens_continued"] += kept
        self._log.warning(
            engine.id, cause, f"{error.detail}; kept {kept} of {len(received.ids)} tokens, the turn continues"
        )
        if cause in ("unreachable", "cut", "aborted"):
            self.health.unreachable(key, str(error))
        elif cause not in ("withdrawn", TOO_MANY_FILES) and error.detail != HUNG:
            self.health.strike(key, str(error))
        if cause in ("stalled", "timeout") and error.detail != HUNG and key not in self._suspects:
            self._abort_hung(engine, cause)
        if any(engine.id in index.engines for index in self._indexes.values()) and not self.health.usable(key):
            self._indexes.clear()
        self.health.retain({incarnation_key(e) for e in self._fleet.table.engines.values()} | {key})
        return kept

    def _abort_hung(self, engine: EngineInfo, cause: str) -> None:
        """After a call has timed out, end the others at its engine once they are stall_s old, unless one gets data.

        Calls without a first chunk would otherwise wait for the timeout of a whole call.
        """
        key = incarnation_key(engine)
        stall_s = max(self._limits.stall_s, PATIENCE * self._pace_s(engine) * self._limits.interval)
        self._suspects.discard(key)
        calls = [call for call, (at, _) in self._calls.items() if incarnation_key(at) == key]
        if self._is_in(engine, SILENT) or any(c.last_data_at > -math.inf and c.silent_s < stall_s for c in calls):
            return  # it may be silent, or it is not
        for call in calls:
            if call.silent_s >= stall_s:
                call.abort(cause, HUNG)
        left = min((stall_s - call.silent_s for call in calls if call.silent_s < stall_s), default=0.0)
        if left:
            self._suspects.add(key)
            asyncio.get_running_loop().call_later(left, self._abort_hung, engine, cause)

    def _is_in(self, engine: EngineInfo, states: frozenset[NodeState]) -> bool:
        now = self._fleet.table.engines.get(engine.id)
        return now is not None and now.incarnation == engine.incarnation and now.state in states

    def _pace_s(self, engine: EngineInfo) -> float:
        """Return what the engine's node last reported: an entry that has expired says nothing about a later time."""
        return self._fleet.table.engines.get(engine.id, engine).pace_s

    def _on_table(self, table: FleetTable) -> None:
        """Apply a new engine table: adjust limits, end calls that must end, admit waiting turns."""
        self.inflight.update(table.engines.values())
        self._indexes.clear()
        for engine in table.engines.values():
            if not same_tokenizer(engine, self._tokenizer):
                self._log.warning(engine.id, "a different tokenizer", "it gets no requests from this server")
        for call, (engine, pinned) in list(self._calls.items()):
            why = self._withdrawn(table, engine, pinned)
            if why:
                call.abort("withdrawn", why)
        self._queue.dispatch()

    def _withdrawn(self, table: FleetTable, engine: EngineInfo, pinned: bool) -> str:
        """Return why a call at `engine` must end now; "" if it may continue.

        An engine that drains or whose registration has expired still generates: its turns move only when another engine
        is available.
        """
        now = table.engines.get(engine.id)
        if now is not None and now.incarnation != engine.incarnation:
            return "the engine was restarted"
        if now is not None and now.state in UNUSABLE:
            return f"the engine is {now.state}"
        if now is None or now.state is NodeState.DRAINING:
            others = self._index(pinned).engines
            elsewhere = len(others) > (engine.id in others)
            return ("its registration has expired" if now is None else "the engine is draining") if elsewhere else ""
        return ""


def size_of(request: GenerateRequest) -> int:
    """Return the maximum number of tokens that a request may hold in an engine's KV cache."""
    return len(request.ids) + request.max_new_tokens


def with_request_log(
    connect: Callable[[EngineInfo], EngineClient], path: Path, fleet: Fleet
) -> Callable[[EngineInfo], EngineClient]:
    """Wrap `connect` to log one line per call: the engine as the router saw it, and the current target."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def connect_and_log(engine: EngineInfo) -> EngineClient:
        target = fleet.table.target
        line = {
            "at": time.time(),
            "engine": engine.id,
            "incarnation": engine.incarnation,
            "state": str(engine.state),
            "version": engine.version.label,
            "target": target.label if target else None,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return connect(engine)

    return connect_and_log
