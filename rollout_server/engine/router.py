"""Which engine generates a turn, and what happens when it does not: the real `Generate`.

A turn is one request, as long as nothing goes wrong. An engine that dies, stalls, drains or is taken away by the
engine table in the middle of it loses nothing that it has sampled: what was received is here as token ids with
log-probs and versions, so another engine goes on from exactly these tokens. Only output of an engine that sent
malformed data is dropped, and that piece is sampled again.

    a call      TurnAssembler.remaining_request() --> RequestQueue.acquire() --> pick_engine()
                --> SglangClient.stream() --> TurnAssembler.add() --> complete? else again
    the table   ends calls at engines that are no longer to be used, dispatches the queue, adjusts the limits
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.messages import EngineInfo, NodeState
from protocol.runtime.metrics import WaitTimer
from rollout_server.dispatch.fleet import Fleet, FleetTable, same_tokenizer
from rollout_server.engine.admission import InflightTracker, RequestQueue, Shortage, incarnation_key
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.client import EngineCall
from rollout_server.engine.continuation import StopChecker, TurnAssembler
from rollout_server.engine.decoding import ReceivedTokens
from rollout_server.engine.health import EngineHealth, RateLimitedLog
from rollout_server.engine.selection import Candidate, pick_engine

REMEMBERED = 65_536
"""Sessions and groups whose engine is remembered; forgetting one costs a prefill."""
LEAST_BACKLOG = 16
"""Turns that may wait before no more groups are begun, however small the limits are."""

UNUSABLE = frozenset({NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.GONE})
"""States of an engine that will send nothing more: its turns go on elsewhere at once."""
SILENT = frozenset({NodeState.LOADING, NodeState.SYNCING})
"""States in which an engine may keep its turns waiting."""
FREE_RETRIES = frozenset({"unreachable", "cut", "aborted", "withdrawn"})
"""Causes that do not use up a turn's attempts: the engine is gone, and another or the same will be there."""

COUNTERS = ("failovers", "tokens_continued", "tokens_unattributed", "tokens_discarded")
"""failovers: further requests that turns needed. Tokens that a request had brought when it failed: kept and not
generated again (tokens_continued), dropped since their version is not known for sure (unattributed), not believed
(distrusted)."""


class EngineClient(Protocol):
    """What the router needs of an engine's client."""

    async def stream(self, request: GenerateRequest, call: EngineCall, *, version: str) -> None: ...


@dataclass(frozen=True)
class TurnLimits:
    """Time and attempts that one turn may take.

    timeout_s  for a request to one engine
    stall_s    between two pieces of its answer
    attempts   requests that fail by the engine's fault
    wait_s     waiting while no engine may be asked
    """

    timeout_s: float = 120.0
    stall_s: float = 20.0
    attempts: int = 4
    wait_s: float = 600.0


class Router:
    """`await router(request)`; raises EngineError when no engine could, after every retry that makes sense.

    connect   a client for an engine
    ending    how the end of a turn shows in its tokens; None: only engines know
    adaptive  whether the requests in flight at an engine are bounded (`AimdLimit`)
    counts    where COUNTERS and `engine_<cause>` (errors by cause) are counted
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
        self.counts.update(dict.fromkeys(COUNTERS, 0))
        self.health, self.inflight = EngineHealth(), InflightTracker(adaptive=adaptive)
        self._adaptive = adaptive
        self._queue = RequestQueue(self._try_acquire, self._release, self._shortage, waits, wait_s=limits.wait_s)
        self._log = RateLimitedLog()
        self._calls: dict[EngineCall, tuple[EngineInfo, bool]] = {}
        """call in flight -> (engine as it was when asked, pinned)"""
        self._engine_of: OrderedDict[str, str] = OrderedDict()
        """s:<session> or g:<group> -> engine id, least recently used first"""
        fleet.listeners.append(self._on_table)
        self._on_table(fleet.table)

    async def __call__(self, request: GenerateRequest) -> Completion:
        if self._vocab_size is not None and max(request.ids, default=0) >= self._vocab_size:
            # SGLang 0.5.21 dies of such an id, and so would the next engine
            raise EngineError("refused", detail=f"a token id is outside the vocabulary of {self._vocab_size}")
        turn = TurnAssembler(request, self._stop_checker)
        failures: dict[str, int] = {}
        attempts = 0
        give_up_at = time.monotonic() + self._limits.wait_s
        while True:
            rest = turn.remaining_request()
            engine = await self._acquire_engine(rest, failures)
            received, error = await self._attempt(engine, rest, turn)
            if error is not None and error.cause == "refused":
                raise error  # the request itself is wrong: every engine would say so
            kept = self._account(engine, turn, received, error)
            completion = turn.completion()
            if completion is not None:
                return completion
            attempts += error is None or error.cause not in FREE_RETRIES
            if kept:
                give_up_at = time.monotonic() + self._limits.wait_s
            if attempts >= self._limits.attempts or time.monotonic() > give_up_at:
                raise error or EngineError("bad_output", engine.id, "its versions change faster than it answers")
            self.counts["failovers"] += 1
            failures[engine.id] = failures.get(engine.id, 0) + 1

    def candidates(self, *, pinned: bool) -> list[EngineInfo]:
        """Return the engines that may be given a request now, whether or not they have capacity."""
        table = self._fleet.table
        if pinned:
            allowed = table.pinned(self._tokenizer, self._fleet.pin)
        else:
            allowed = [
                e for e in table.engines.values() if table.routable(e, max_lag=self._max_lag, tokenizer=self._tokenizer)
            ]
        return [e for e in allowed if self.health.usable(incarnation_key(e))]

    def unroutable_reason(self, engine: EngineInfo) -> str:
        """Why `engine` is given no training request now, "" when it is."""
        why = self._fleet.table.unroutable_reason(engine, max_lag=self._max_lag, tokenizer=self._tokenizer)
        return why or ("" if self.health.usable(incarnation_key(engine)) else "is ejected after errors")

    @property
    def waiting(self) -> int:
        """Turns that wait for an engine."""
        return len(self._queue)

    def backpressure(self) -> bool:
        """Whether more turns wait than half of all limits: a new group would only wait with them."""
        if not self._adaptive:
            return False
        limits = sum(self.inflight.limit(e) or 0 for e in self.candidates(pinned=False))
        return self.waiting > max(LEAST_BACKLOG, limits // 2)

    async def _acquire_engine(self, request: GenerateRequest, failures: Mapping[str, int]) -> EngineInfo:
        """Return an engine with capacity taken, as the table has it now. Raises EngineError("no_engine")."""
        while True:
            taken = await self._queue.acquire(request, failures)
            for engine in self.candidates(pinned=request.pinned):
                if incarnation_key(engine) == incarnation_key(taken):
                    return engine
            self._release(taken, request)  # the table changed meanwhile

    def _try_acquire(
        self, request: GenerateRequest, failures: Mapping[str, int], *, returning: bool
    ) -> EngineInfo | None:
        """Take capacity, or return None. `returning`: only at the engine of the prefix, unless it failed this turn."""
        inflight = self.inflight
        names = f"s:{request.session}", f"g:{request.group}"
        usual = [self._engine_of.get(name, "") for name in names]
        own = "" if failures.get(usual[0]) else usual[0]
        candidates = self.candidates(pinned=request.pinned)
        found = {
            e.id: e
            for e in candidates
            if (e.id == own or not returning) and inflight.has_capacity(e, returning=e.id == own)
        }
        if not found:
            return None
        size = size_of(request)
        chosen = pick_engine(
            [Candidate(e.id, inflight.load(e), e.running + e.waiting, failures.get(e.id, 0)) for e in found.values()],
            usual,
            size,
        )
        for name in names:
            self._engine_of[name] = chosen
            self._engine_of.move_to_end(name)
            if len(self._engine_of) > REMEMBERED:
                self._engine_of.popitem(last=False)
        inflight.add(found[chosen], size)
        return found[chosen]

    def _release(self, engine: EngineInfo, request: GenerateRequest) -> None:
        self.inflight.remove(engine, size_of(request))
        self._queue.dispatch()

    def _shortage(self, pinned: bool) -> Shortage:
        return "window" if self.candidates(pinned=pinned) else "engine"

    async def _attempt(
        self, engine: EngineInfo, request: GenerateRequest, turn: TurnAssembler
    ) -> tuple[ReceivedTokens, EngineError | None]:
        """Send one request. Returns what it brought, and the error that ended it."""
        received = ReceivedTokens(
            engine.id,
            request.max_new_tokens,
            vocab_size=self._vocab_size,
            label=engine.version.label,
            # an engine knows the version of its weights, not that of an adapter over them
            fixed=engine.version if engine.adapter else None,
        )
        call = EngineCall(
            received,
            timeout_s=self._limits.timeout_s,
            stall_s=self._limits.stall_s,
            may_pause=lambda: self._is_in(engine, SILENT),
            # an engine cannot see a stop string that began before its own tokens
            should_end=(lambda: turn.ends_within(received.ids)) if turn.ids else None,
        )
        self._calls[call] = engine, request.pinned
        try:
            await self._connect(engine).stream(request, call, version=engine.version.label)
        except EngineError as error:
            return received, error
        finally:
            del self._calls[call]
            self._release(engine, request)
        return received, None

    def _account(
        self, engine: EngineInfo, turn: TurnAssembler, received: ReceivedTokens, error: EngineError | None
    ) -> int:
        """Add what was received to the turn, and note how the engine did. Returns the tokens added."""
        key, cause = incarnation_key(engine), error.cause if error else ""
        kept = len(received.ids)
        if cause == "bad_output":
            # earlier tokens of an engine that sends malformed data may be wrong too
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
            engine.id, cause, f"{error.detail}; {kept} tokens of {len(received.ids)} are kept, the turn goes on"
        )
        if cause in ("unreachable", "cut", "aborted"):
            self.health.unreachable(key, str(error))
        elif cause != "withdrawn":
            self.health.strike(key, str(error))
        if cause in ("stalled", "timeout"):
            self._abort_hung(key, cause)
        self.health.retain({incarnation_key(e) for e in self._fleet.table.engines.values()} | {key})
        return kept

    def _abort_hung(self, key: str, cause: str) -> None:
        """End all calls at an engine that has let one time out and is silent to the others too.

        Those that it has not begun to answer would otherwise wait for the timeout of a whole call.
        """
        calls = [call for call, (engine, _) in self._calls.items() if incarnation_key(engine) == key]
        last = max((call.last_data_at for call in calls), default=0.0)
        if asyncio.get_running_loop().time() - last >= self._limits.stall_s:
            for call in calls:
                call.abort(cause, "silent to every request")

    def _is_in(self, engine: EngineInfo, states: frozenset[NodeState]) -> bool:
        now = self._fleet.table.engines.get(engine.id)
        return now is not None and now.incarnation == engine.incarnation and now.state in states

    def _on_table(self, table: FleetTable) -> None:
        """Take in a new engine table: adjust limits, end calls that must end, admit turns."""
        self.inflight.update(table.engines.values())
        for engine in table.engines.values():
            if not same_tokenizer(engine, self._tokenizer):
                self._log.warning(engine.id, "a different tokenizer", "it gets no requests from here")
        for call, (engine, pinned) in list(self._calls.items()):
            why = self._withdrawn(table, engine, pinned)
            if why:
                call.abort("withdrawn", why)
        self._queue.dispatch()

    def _withdrawn(self, table: FleetTable, engine: EngineInfo, pinned: bool) -> str:
        """Why a call at `engine` must end now, "" when it need not.

        An engine that drains, or whose registration lapsed, still generates: its turns leave only when there is
        another engine for them.
        """
        now = table.engines.get(engine.id)
        if now is not None and now.incarnation != engine.incarnation:
            return "it was restarted"
        if now is not None and now.state in UNUSABLE:
            return f"it is {now.state}"
        if now is None or now.state is NodeState.DRAINING:
            elsewhere = any(e.id != engine.id for e in self.candidates(pinned=pinned))
            return ("its registration has lapsed" if now is None else "it drains") if elsewhere else ""
        return ""


def size_of(request: GenerateRequest) -> int:
    """Tokens that a request may hold in an engine's cache."""
    return len(request.ids) + request.max_new_tokens


def with_request_log(
    connect: Callable[[EngineInfo], EngineClient], path: Path, fleet: Fleet
) -> Callable[[EngineInfo], EngineClient]:
    """Wrap `connect` to log a line for each call: the engine as the router saw it, and the target at that moment."""
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
