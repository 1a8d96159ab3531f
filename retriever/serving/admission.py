"""How much may be queued, and how long it will take: the bound behind 429, and the Retry-After that goes with it.

With `patience_s` a request that finds no room waits for it, first come first served: clients of others do not try
again after 429, and one refusal fails their batch.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

from protocol.errors import ForayError
from retriever.metrics import Metrics

MAX_WAIT_S = 30
"""Longest Retry-After (s): speeds change, and a client that is told minutes gives up."""

MOST_WAITING = 1024
"""Requests that wait for room at once; further ones are refused."""

_FRESH = 0.3
"""Weight of the newest batch in the speed."""


class Overloaded(ForayError):
    """The queue is full: try again in `wait_s` seconds. `status` is 429, or 503 after a wait: the one that others'
    clients try again after."""

    def __init__(self, what: str, wait_s: int, status: int) -> None:
        super().__init__(what)
        self.wait_s, self.status = wait_s, status


class Room:
    """One bound over everything that waits for the back-end or is in it: queries and texts to embed."""

    def __init__(self, limit: int, metrics: Metrics, *, lanes: int = 1, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a request waits for room before it is refused."""
        self._limit, self._metrics, self._lanes, self._patience_s = limit, metrics, lanes, patience_s
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds_each: float | None = None

    def enter(self, count: int) -> bool:
        """Take places, or none where they are not free or others wait for some. An empty service takes a request of
        any size: refusing it would be for ever."""
        if self._waiting or not self._fits(count):
            return False
        self._take(count)
        return True

    async def wait(self, count: int) -> None:
        """Take places as soon as they are free and earlier requests have theirs. Raises Overloaded when that is not
        within `patience_s`, and takes none."""
        if not self._patience_s or len(self._waiting) >= MOST_WAITING:
            raise self._overloaded()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        self._metrics.waited.inc()
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # it may have been a large one that held up smaller ones
            elif turn.done() and not turn.cancelled():
                self.leave(count)  # its places came together with its end
            if isinstance(error, TimeoutError):
                raise self._overloaded() from None
            raise

    def leave(self, count: int) -> None:
        """Give places back."""
        self._take(-count)
        self._admit()

    def _fits(self, count: int) -> bool:
        return not self._taken or self._taken + count <= self._limit

    def _take(self, count: int) -> None:
        self._taken += count
        self._metrics.queue.set(self._taken)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._take(count)
                turn.set_result(None)

    def _overloaded(self) -> Overloaded:
        waited = f" after {self._patience_s:g} s" if self._patience_s else ""
        what = f"{self._taken} queries are queued{waited}, the limit is {self._limit}"
        return Overloaded(what, self.wait_s(), 503 if self._patience_s else 429)

    def note_speed(self, count: int, seconds: float) -> None:
        """One lane did `count` in so many seconds."""
        each = seconds / count
        before = self._seconds_each
        self._seconds_each = each if before is None else before + _FRESH * (each - before)

    def wait_s(self) -> int:
        """Seconds until what is queued now will be done at the recent speed: whole, at least 1, at most MAX_WAIT_S."""
        seconds = self._taken * (self._seconds_each or 0.0) / self._lanes
        return max(1, min(MAX_WAIT_S, math.ceil(seconds)))
