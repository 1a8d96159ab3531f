"""Admission control: requests in flight at each engine, their limit, and the queue of waiting turns.

With W waiting turns and E engines, a turn costs O(log W) and the choice of its engine; `InflightTracker.update` O(E);
while no engine is usable, a check of the queue O(W), twice a second.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, Protocol

from protocol.messages import EngineInfo
from protocol.runtime.metrics import WaitTimer
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.selection import tokens_of_others

SHRINK = 0.7
PERIOD_S = 2.0
"""Minimum seconds between two changes of a limit: a node's heartbeat, so that the effect of a change is visible."""
RETURNING = 1.5
"""Factor on the limit for later turns of trajectories that were generated at this engine."""
UNKNOWN_CAPACITY = 1024
"""Initial limit for an engine that does not report its maximum batch size."""
REMEMBERED_GROUPS = 65_536
"""Number of groups whose age is remembered."""
FIRST_TURN_TOKENS = 64.0
"""Tokens that a turn is expected to have before any has ended."""
LEARNING_RATE = 1 / 16
"""Weight of the newest turn in what is learnt of speeds and lengths."""
RECHECK_S = 0.5
"""Interval at which the queue is checked: an engine's ejection may end without a change in Redis."""

Shortage = Literal["engine", "window", "eval"]
"""What queued turns wait for: a usable engine, capacity at one, or capacity at one that only serves evaluations."""


class AimdLimit:
    """Limit of requests in flight to one incarnation of an engine: additive increase, multiplicative decrease.

    An engine with too many requests retracts some (frees their KV cache and computes them again later) or queues them,
    where they become stale and cannot be routed to another engine. Rollout servers that follow the same rule share an
    engine fairly without coordination (Chiu and Jain, 1989).

    * Start: the engine's maximum batch size (`max_running`).
    * Ceiling: `max_running` plus a headroom of a sixteenth, which queues at the engine and fills the batch when another
      request ends. Floor: a sixteenth.
    * Shrinks to 0.7 of its size when more than twice the headroom is queued at the engine, or requests were retracted
      since the last observation. Grows by the headroom when it was reached and neither was the case.
    * Does not shrink again before the last decrease has taken effect: before the requests in flight have fallen to the
      limit, including the allowance for later turns of trajectories (`RETURNING`) if there were any.
    """

    def __init__(self, engine: EngineInfo, now: float) -> None:
        capacity = engine.max_running or UNKNOWN_CAPACITY
        self._headroom = max(2, capacity // 16)
        self._ceiling, self._floor = capacity + self._headroom, max(1, capacity // 16)
        self._size = float(capacity)
        self._retractions = engine.retractions
        self._changed_at = now
        self._was_full = self._exceeded = False
        self.in_flight = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def has_capacity(self, *, returning: bool = False) -> bool:
        """Return whether one more request may be sent. A limit that was reached may grow.

        returning  a later turn of a trajectory that was generated at this engine. It may exceed the limit by half,
                   since waiting costs less than computing the prefix again at another engine.
        """
        free = self.in_flight < self.size * (RETURNING if returning else 1.0)
        self._was_full = self._was_full or not free
        self._exceeded = self._exceeded or (free and self.in_flight >= self.size)
        return free

    def observe(self, engine: EngineInfo, now: float) -> None:
        """Adjust the limit to the load that the engine reports."""
        if now - self._changed_at < PERIOD_S:
            return
        quiet = engine.waiting <= self._headroom
        struggles = engine.waiting > 2 * self._headroom or engine.retractions > self._retractions
        self._retractions = engine.retractions
        size = self._size
        if struggles and self.in_flight <= math.ceil(size * (RETURNING if self._exceeded else 1.0)):
            self._size = max(self._floor, SHRINK * size)
        elif quiet and not struggles and self._was_full:
            self._size = min(self._ceiling, size + self._headroom)
        if self._size != size or not struggles:
            self._was_full = self._exceeded = False
            self._changed_at = now


def incarnation_key(engine: EngineInfo) -> str:
    """Return the key of all state kept for an engine. A restarted engine has a new key, so its state is reset."""
    return f"{engine.id}/{engine.incarnation}"


@dataclass
class _EngineLoad:
    limit: AimdLimit
    capacity: int
    tokens: int = 0
    foreign: float = 0.0
    """tokens of other rollout servers, estimated from the last heartbeat"""
    others: int = 0
    """requests of other rollout servers in that heartbeat"""
    speed: float = 0.0
    """seconds per token of a single request, learnt; 0: no turn has ended there yet"""
    assumed: float = 1.0
    """the same until it is learnt: the mean of the engines for which it is"""

    def slowdown(self, requests: int) -> float:
        """Return the factor on the seconds per token with this many requests of ours: 2 if the batch is full."""
        return 1.0 + (requests + self.others) / self.capacity


class InflightTracker:
    """Requests and tokens in flight at each engine incarnation, and its speed. `adaptive` False: no limit.

    turn_tokens  mean number of tokens that recent turns had
    """

    def __init__(self, *, adaptive: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._adaptive, self._clock = adaptive, clock
        self._loads: dict[str, _EngineLoad] = {}
        self.turn_tokens = FIRST_TURN_TOKENS

    def update(self, engines: Iterable[EngineInfo]) -> None:
        """Apply a new engine table. The state of a removed incarnation is deleted when its last request has ended."""
        now = self._clock()
        present = {incarnation_key(engine): engine for engine in engines}
        for engine in present.values():
            load = self._load_of(engine)
            load.limit.observe(engine, now)
            ours = load.limit.in_flight
            load.foreign = tokens_of_others(engine, ours, load.tokens // ours if ours else 1)
            load.others = max(0, engine.running + engine.waiting - ours)
        for key in [k for k, load in self._loads.items() if k not in present and not load.limit.in_flight]:
            del self._loads[key]
        known = [load.speed for load in self._loads.values() if load.speed]
        for load in self._loads.values():
            load.assumed = fmean(known) if known else 1.0

    def learn(self, engine: EngineInfo, tokens: int, seconds: float) -> None:
        """Learn the speed of `engine` from a request still in flight: its last `tokens` took `seconds`."""
        load = self._load_of(engine)
        seen = seconds / tokens / load.slowdown(load.limit.in_flight)
        load.speed += (seen - load.speed) * (LEARNING_RATE if load.speed else 1.0)

    def learn_length(self, tokens: int) -> None:
        """Learn the length of turns from one that is complete."""
        self.turn_tokens += (tokens - self.turn_tokens) * LEARNING_RATE

    def pace(self, engine: EngineInfo) -> float:
        """Return the seconds per token expected of `engine` with one more request; before any is learnt, a ratio."""
        load = self._load_of(engine)
        return (load.speed or load.assumed) * load.slowdown(load.limit.in_flight + 1)

    def has_capacity(self, engine: EngineInfo, *, returning: bool = False) -> bool:
        """Return whether one more request may be sent to `engine`. `returning`: see `AimdLimit.has_capacity`."""
        return self._load_of(engine).limit.has_capacity(returning=returning) or not self._adaptive

    def load(self, engine: EngineInfo) -> float:
        """Return the tokens in flight at `engine`: ours (prompt plus maximum answer), and an estimate of the rest."""
        load = self._load_of(engine)
        return load.tokens + load.foreign

    def add(self, engine: EngineInfo, size: int) -> None:
        """Count a request of `size` tokens to `engine`."""
        load = self._load_of(engine)
        load.limit.in_flight += 1
        load.tokens += size

    def remove(self, engine: EngineInfo, size: int) -> None:
        """Stop counting a request that has ended."""
        load = self._load_of(engine)
        load.limit.in_flight -= 1
        load.tokens -= size

    def limit(self, engine: EngineInfo) -> int | None:
        """Return the limit of requests in flight at `engine`; None: no limit."""
        return self._load_of(engine).limit.size if self._adaptive else None

    def requests(self, engine: EngineInfo) -> int:
        """Return the number of requests from this server in flight at `engine`."""
        return self._load_of(engine).limit.in_flight

    def tokens(self, engine: EngineInfo) -> int:
        """Return the number of tokens from this server in flight at `engine`."""
        return self._load_of(engine).tokens

    @property
    def in_flight(self) -> int:
        """Return the number of requests from this server in flight at all engines."""
        return sum(load.limit.in_flight for load in self._loads.values())

    def _load_of(self, engine: EngineInfo) -> _EngineLoad:
        key = incarnation_key(engine)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _EngineLoad(
                AimdLimit(engine, self._clock()), engine.max_running or UNKNOWN_CAPACITY
            )
        return load


class TryAcquire(Protocol):
    """Take capacity for a request, given how often each engine has failed it. Return None if there is none.

    returning  only at the engine that generated the trajectory's earlier turns
    """

    def __call__(
        self, request: GenerateRequest, failures: Mapping[str, int], *, returning: bool
    ) -> EngineInfo | None: ...


@dataclass(order=True)
class _Waiter:
    age: int
    number: int
    request: GenerateRequest = field(compare=False)
    failures: Mapping[str, int] = field(compare=False)
    engine: asyncio.Future[EngineInfo] = field(compare=False)
    since: float = field(compare=False)


class RequestQueue:
    """Turns that wait for an engine. The oldest group comes first, so that groups finish one after another.

    Training and evaluation (`pinned`) have separate queues, since they may use different engines. Call `dispatch`
    whenever capacity may have become free.

    try_acquire  takes capacity at an engine for a request
    release      returns capacity that was taken for a turn which was then cancelled
    shortage     what a queue waits for now
    wait_s       timeout for a turn while no engine is usable. Time in which others had the capacity does not count
    """

    def __init__(
        self,
        try_acquire: TryAcquire,
        release: Callable[[EngineInfo, GenerateRequest], None],
        shortage: Callable[[bool], Shortage],
        waits: WaitTimer,
        *,
        wait_s: float,
    ) -> None:
        self._try_acquire, self._release, self._shortage = try_acquire, release, shortage
        self._waits, self._wait_s = waits, wait_s
        self._queues: dict[bool, list[_Waiter]] = {False: [], True: []}
        self._numbers = itertools.count()
        self._ages: OrderedDict[str, int] = OrderedDict()
        self._open_waits: dict[Shortage, AbstractContextManager[None]] = {}
        self._unusable_since: dict[bool, float] = {}
        """pinned -> when the last usable engine was lost, by the loop's clock; for queues that wait for an engine"""
        self._ticking = False

    def waiting(self, *, pinned: bool) -> int:
        """Return the number of turns of training, or of evaluation, that wait."""
        return sum(not waiter.engine.done() for waiter in self._queues[pinned])

    async def acquire(self, request: GenerateRequest, failures: Mapping[str, int]) -> EngineInfo:
        """Take capacity for the request and return its engine. Raises EngineError("no_engine").

        Returns at once if there is capacity and the queue is empty, or if the engine of the earlier turns has capacity.
        """
        age = self._age(request.group)
        queue = self._queues[request.pinned]
        engine = self._try_acquire(request, failures, returning=bool(queue))
        if engine is not None:
            return engine
        loop = asyncio.get_running_loop()
        waiter = _Waiter(age, next(self._numbers), request, failures, loop.create_future(), loop.time())
        heapq.heappush(queue, waiter)
        self.dispatch()
        if not self._ticking:
            self._ticking = True
            loop.call_later(RECHECK_S, self._tick)
        try:
            return await waiter.engine
        except asyncio.CancelledError:
            if waiter.engine.done() and not waiter.engine.cancelled() and waiter.engine.exception() is None:
                self._release(waiter.engine.result(), request)
            self.dispatch()
            raise

    def dispatch(self) -> None:
        """Admit waiting turns while there is capacity. Start and stop the wait timers."""
        while self._dispatch_one():
            pass
        shortages = {pinned: self._shortage(pinned) for pinned, queue in self._queues.items() if queue}
        now = asyncio.get_running_loop().time() if shortages else 0.0
        before, lacking = self._unusable_since, [pinned for pinned, cause in shortages.items() if cause == "engine"]
        self._unusable_since = {pinned: before.get(pinned, now) for pinned in lacking}
        shortage = set(shortages.values())
        for cause in shortage - self._open_waits.keys():
            self._open_waits[cause] = self._waits.blocked_on(cause)
            self._open_waits[cause].__enter__()
        for cause in self._open_waits.keys() - shortage:
            self._open_waits.pop(cause).__exit__(None, None, None)

    def _dispatch_one(self) -> bool:
        """Admit the head of the training or the evaluation queue: the one with the older group that has capacity."""
        for queue in self._queues.values():
            while queue and queue[0].engine.done():  # cancelled
                heapq.heappop(queue)
        for queue in sorted((queue for queue in self._queues.values() if queue), key=lambda queue: queue[0]):
            engine = self._try_acquire(queue[0].request, queue[0].failures, returning=False)
            if engine is not None:
                heapq.heappop(queue).engine.set_result(engine)
                return True
        return False

    def _tick(self) -> None:
        """Dispatch, fail turns past their deadline, and schedule the next tick while any turn waits."""
        loop = asyncio.get_running_loop()
        self.dispatch()
        for pinned, since in self._unusable_since.items():
            for waiter in self._queues[pinned]:
                if not waiter.engine.done() and loop.time() >= max(since, waiter.since) + self._wait_s:
                    error = EngineError("no_engine", detail=f"no engine was usable for {self._wait_s:g} s")
                    waiter.engine.set_exception(error)
        self._ticking = any(self._queues.values())
        if self._ticking:
            loop.call_later(RECHECK_S, self._tick)

    def _age(self, group: str) -> int:
        """Return the sort key of a group, the same for all its turns: older groups have smaller keys."""
        age = self._ages.setdefault(group, next(self._numbers))
        if len(self._ages) > REMEMBERED_GROUPS:
            self._ages.popitem(last=False)
        return age
