"""How much may be queued, and how long it will take: the bound behind 429, and the Retry-After that goes with it."""

from __future__ import annotations

import math

from protocol.errors import ForayError
from retriever.metrics import Metrics

MAX_WAIT_S = 30
"""Longest Retry-After (s): speeds change, and a client that is told minutes gives up."""

_FRESH = 0.3
"""Weight of the newest batch in the speed."""


class Overloaded(ForayError):
    """The queue is full: try again in `wait_s` seconds (429)."""

    def __init__(self, what: str, wait_s: int) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class Room:
    """One bound over everything that waits for the back-end or is in it: queries and texts to embed."""

    def __init__(self, limit: int, metrics: Metrics, *, lanes: int = 1) -> None:
        self._limit, self._metrics, self._lanes = limit, metrics, lanes
        self._taken = 0
        self._seconds_each: float | None = None

    def enter(self, count: int) -> None:
        """Take places, or raise Overloaded and take none. An empty service takes a request of any size: refusing it
        would be for ever."""
        if self._taken and self._taken + count > self._limit:
            raise Overloaded(f"{self._taken} queries are queued, the limit is {self._limit}", self.wait_s())
        self._taken += count
        self._metrics.queue.set(self._taken)

    def leave(self, count: int) -> None:
        """Give places back."""
        self._taken -= count
        self._metrics.queue.set(self._taken)

    def note_speed(self, count: int, seconds: float) -> None:
        """One lane did `count` in so many seconds."""
        each = seconds / count
        before = self._seconds_each
        self._seconds_each = each if before is None else before + _FRESH * (each - before)

    def wait_s(self) -> int:
        """Seconds until what is queued now will be done at the recent speed: whole, at least 1, at most MAX_WAIT_S."""
        seconds = self._taken * (self._seconds_each or 0.0) / self._lanes
        return max(1, min(MAX_WAIT_S, math.ceil(seconds)))
