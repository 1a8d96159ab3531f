"""Seconds stood waiting, by cause: what tells an operator who waits for whom.

Many coroutines wait at once, and adding up their seconds would say nothing about a second of the clock. So a cause
accrues wall-clock time while at least one of them waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waits:
    """`with waits.during("engine"): ...` around every wait; `seconds()` for the metrics."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total: dict[str, float] = {}
        self._waiting: dict[str, tuple[int, float]] = {}
        """cause -> (how many wait, since when at least one does)"""

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        count, since = self._waiting.get(cause, (0, 0.0))
        self._waiting[cause] = (count + 1, since if count else self._clock())
        try:
            yield
        finally:
            count, since = self._waiting.pop(cause)
            if count > 1:
                self._waiting[cause] = (count - 1, since)
            else:
                self._total[cause] = self._total.get(cause, 0.0) + self._clock() - since

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Seconds since the start by cause, those of waits that still go on included; as of `now` by the same clock."""
        now = self._clock() if now is None else now
        out = dict(self._total)
        for cause, (_, since) in self._waiting.items():
            out[cause] = out.get(cause, 0.0) + now - since
        return out
