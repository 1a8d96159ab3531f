"""What this server has in flight at each engine, and whether one more may go there. Pure but for the clock."""

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
from typing import Literal, Protocol

from protocol.messages import EngineInfo
from protocol.runtime.waits import Waits
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.selection import foreign_tokens

# How many requests this server has in flight at one engine: additive increase, multiplicative decrease. Pure.
#
# An engine with too many requests puts some back for want of KV cache and computes them again (a retraction), or lets
# them queue, where they grow stale and cannot go elsewhere. Several rollout servers that shrink and grow by the same
# rule share an engine fairly without knowing of each other (Chiu and Jain, 1989).

SHRINK = 0.7
PERIOD_S = 2.0
"""One change in so long at most: a node's heartbeat, so that the engine's answer to the last change is seen first."""
RETURNING = 1.5
"""Size of the window, in its own units, for later turns of trajectories that were generated at this engine."""
UNKNOWN_CAPACITY = 1024
"""Requests for an engine that does not say how many it runs together."""


class Window:
    """Requests in flight from here to one incarnation of an engine.

    Starts at what the engine runs together (`max_running`). Ceiling: that and a headroom of a sixteenth, which waits at
    the engine and fills the gap when another ends. Floor: a sixteenth. Shrinks to 0.7 of itself when more than
    twice the headroom wait there, or requests were retracted since the last look; grows by the headroom when it was
    full and the engine was quiet. It never shrinks again before the last time has had its effect: before as many
    requests are in flight as may be, later turns of trajectories (`RETURNING`) included where there were any.
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

    def room(self, *, returning: bool = False) -> bool:
        """Whether one more may go. A window that says no is one that could grow.

        returning  a later turn of a trajectory that was generated here: it may exceed the window by half, since the
                   wait for this engine costs less than computing its prefix again at another
        """
        free = self.in_flight < self.size * (RETURNING if returning else 1.0)
        self._was_full = self._was_full or not free
        self._exceeded = self._exceeded or (free and self.in_flight >= self.size)
        return free

    def observe(self, engine: EngineInfo, now: float) -> None:
        """Draw the conclusions of what the engine reports now."""
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
    """What everything that is known of an engine is booked under: a restarted one starts anew."""
    return f"{engine.id}/{engine.incarnation}"


@dataclass
class _Place:
    window: Window
    tokens: int = 0
    foreign: float = 0.0
    """tokens of other rollout servers, by the last heartbeat"""


class Places:
    """By incarnation. `adaptive` False: there is always room."""

    def __init__(self, *, adaptive: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._adaptive, self._clock = adaptive, clock
        self._places: dict[str, _Place] = {}

    def report(self, engines: Iterable[EngineInfo]) -> None:
        """The engine table as of now. Incarnations that are gone are forgotten when their last request is."""
        now = self._clock()
        present = {incarnation_key(engine): engine for engine in engines}
        for engine in present.values():
            place = self._of(engine)
            place.window.observe(engine, now)
            ours = place.window.in_flight
            place.foreign = foreign_tokens(engine, ours, place.tokens // ours if ours else 1)
        for key in [k for k, p in self._places.items() if k not in present and not p.window.in_flight]:
            del self._places[key]

    def room(self, engine: EngineInfo, *, returning: bool = False) -> bool:
        """Whether one more request may go there. `returning`: see `Window.room`."""
        return self._of(engine).window.room(returning=returning) or not self._adaptive

    def load(self, engine: EngineInfo) -> float:
        """Tokens in flight there: ours, prompt and allowance for the answer, and what others seem to have."""
        place = self._of(engine)
        return place.tokens + place.foreign

    def enter(self, engine: EngineInfo, size: int) -> None:
        """A request of `size` tokens goes there."""
        place = self._of(engine)
        place.window.in_flight += 1
        place.tokens += size

    def leave(self, engine: EngineInfo, size: int) -> None:
        """It is over."""
        place = self._of(engine)
        place.window.in_flight -= 1
        place.tokens -= size

    def window(self, engine: EngineInfo) -> int | None:
        """Requests that may be in flight there; None: any number."""
        return self._of(engine).window.size if self._adaptive else None

    def requests(self, engine: EngineInfo) -> int:
        """Requests of ours in flight there."""
        return self._of(engine).window.in_flight

    def tokens(self, engine: EngineInfo) -> int:
        """Tokens of ours in flight there."""
        return self._of(engine).tokens

    @property
    def in_flight(self) -> int:
        """Requests of ours in flight anywhere."""
        return sum(place.window.in_flight for place in self._places.values())

    def _of(self, engine: EngineInfo) -> _Place:
        key = incarnation_key(engine)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(Window(engine, self._clock()))
        return place


# Turns that wait for a place at an engine: the oldest group first, so that groups end one after the other.

REMEMBERED = 65_536
"""Groups whose age is remembered."""
RECHECK_S = 0.5
"""How often those who wait are looked at: an engine may end its rest without any change in Redis."""

Lacking = Literal["engine", "window"]
"""What those in a line wait for: any engine that may be asked, or room at one of those that may."""


class Take(Protocol):
    """Takes a place for a request, its engines' failures given; None while there is none.

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
    place: asyncio.Future[EngineInfo] = field(compare=False)
    deadline: float = field(compare=False)


class Line:
    """Two lines, since evaluation (`pinned`) may use other engines. `move` whenever a place may have come free.

    take      takes a place at an engine for a request
    give_back returns a place that was taken for a turn which was then cancelled
    lacking   what a line waits for now
    wait_s    how long a turn may wait while there is no engine that may be asked
    """

    def __init__(
        self,
        take: Take,
        give_back: Callable[[EngineInfo, GenerateRequest], None],
        lacking: Callable[[bool], Lacking],
        waits: Waits,
        *,
        wait_s: float,
    ) -> None:
        self._take, self._give_back, self._lacking = take, give_back, lacking
        self._waits, self._wait_s = waits, wait_s
        self._lines: dict[bool, list[_Waiter]] = {False: [], True: []}
        self._numbers = itertools.count()
        self._ages: OrderedDict[str, int] = OrderedDict()
        self._open: dict[Lacking, AbstractContextManager[None]] = {}
        self._ticking = False

    def __len__(self) -> int:
        return sum(not waiter.place.done() for line in self._lines.values() for waiter in line)

    async def stand(self, request: GenerateRequest, failures: Mapping[str, int]) -> EngineInfo:
        """A place: at once when there is one and nothing waits, or when this is a later turn of a trajectory whose
        engine has room for it. Raises EngineError("no_engine").
        """
        age = self._age(request.group)
        line = self._lines[request.pinned]
        engine = self._take(request, failures, returning=bool(line))
        if engine is not None:
            return engine
        loop = asyncio.get_running_loop()
        waiter = _Waiter(age, next(self._numbers), request, failures, loop.create_future(), loop.time() + self._wait_s)
        heapq.heappush(line, waiter)
        self.move()
        if not self._ticking:
            self._ticking = True
            loop.call_later(RECHECK_S, self._tick)
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self._give_back(waiter.place.result(), request)
            self.move()
            raise

    def move(self) -> None:
        """Gives places to those who wait, as long as there are any; sees to the waiting times."""
        while self._move_one():
            pass
        lacking = {self._lacking(pinned) for pinned, line in self._lines.items() if line}
        for cause in lacking - self._open.keys():
            self._open[cause] = self._waits.during(cause)
            self._open[cause].__enter__()
        for cause in self._open.keys() - lacking:
            self._open.pop(cause).__exit__(None, None, None)

    def _move_one(self) -> bool:
        """Give one place to the head of a line, training or evaluation: the one whose group was seen first, if there
        is a place for it.
        """
        for line in self._lines.values():
            while line and line[0].place.done():  # cancelled
                heapq.heappop(line)
        for line in sorted((line for line in self._lines.values() if line), key=lambda line: line[0]):
            engine = self._take(line[0].request, line[0].failures, returning=False)
            if engine is not None:
                heapq.heappop(line).place.set_result(engine)
                return True
        return False

    def _tick(self) -> None:
        """Looks again, ends waits that are past their deadline, and comes back while anybody waits."""
        loop = asyncio.get_running_loop()
        self.move()
        for pinned, line in self._lines.items():
            if not line or self._lacking(pinned) != "engine":
                continue
            for waiter in line:
                if not waiter.place.done() and loop.time() >= waiter.deadline:
                    error = EngineError("no_engine", detail=f"none may take a request for {self._wait_s:g} s")
                    waiter.place.set_exception(error)
        self._ticking = any(self._lines.values())
        if self._ticking:
            loop.call_later(RECHECK_S, self._tick)

    def _age(self, group: str) -> int:
        """The same number for all turns of a group; a smaller one the earlier it was first seen."""
        age = self._ages.setdefault(group, next(self._numbers))
        if len(self._ages) > REMEMBERED:
            self._ages.popitem(last=False)
        return age
