"""Turns that wait for a place at an engine: the oldest group first, so that groups end one after the other."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from protocol.messages import EngineInfo
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.waits import Waits

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
