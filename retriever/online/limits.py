"""What keeps an engine from being asked too fast, or for more than was meant to be spent. No I/O.

Both belong to one event loop and are shared by all queries of a service.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from retriever.config_online import OnlineBase
from retriever.online.provider import Failed

LONGEST_PAUSE_S = 60.0
"""Most that one `Retry-After` holds up all other queries."""


class TokenBucket:
    """At most `rate` requests a second in the long run, at most `burst` at once.

    Generic cell rate algorithm (ITU-T I.371): a caller is told at once when its turn is, first come first served, so
    that nobody overtakes and nothing needs to be woken.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._slack, self._clock = 1 / rate, (burst - 1) / rate, clock
        self._due = self._paused_until = float("-inf")

    def turn(self, longest_s: float) -> float:
        """Seconds until the caller may send; the turn is taken. Failed, and none is taken, beyond `longest_s`."""
        now = self._clock()
        due = max(self._due, now)
        start = max(due - self._slack, now, self._paused_until)
        if start - now > longest_s:
            if start == self._paused_until:
                raise Failed("http_429", f"the provider asked for a pause, {start - now:.1f} s of it are left")
            raise Failed("timeout", f"its turn at this rate is in {start - now:.1f} s, the deadline before")
        self._due = max(due, start) + self._interval
        return start - now

    def pause(self, seconds: float) -> None:
        """Nobody's turn comes within the next `seconds`, at most LONGEST_PAUSE_S."""
        until = self._clock() + min(seconds, LONGEST_PAUSE_S)
        self._paused_until = max(self._paused_until, until)


class Budget:
    """Requests that may still be sent, and what all of them cost: an upper bound of the bill, as a request counts when
    it is sent, whatever comes back."""

    def __init__(self, settings: OnlineBase, clock: Callable[[], float] = time.time) -> None:
        self._price, self._daily, self._clock = settings.cost_per_request, settings.budget_period == "day", clock
        bounds = [] if settings.max_requests is None else [settings.max_requests]
        if settings.max_cost is not None and self._price > 0:
            bounds.append(int(settings.max_cost / self._price + 1e-9))
        self._bound = min(bounds, default=None)
        self._day, self._used = self._today(), 0
        self.requests = 0

    @property
    def cost(self) -> float:
        """Of all requests since the start, in the unit of `cost_per_request`."""
        return self.requests * self._price

    @property
    def left(self) -> int | None:
        """Requests left in this period; None without a bound."""
        if self._daily and (today := self._today()) != self._day:
            self._day, self._used = today, 0
        return None if self._bound is None else max(0, self._bound - self._used)

    def check(self) -> None:
        """Raise Failed("quota") where nothing is left."""
        if self.left == 0:
            period = "day" if self._daily else "process"
            raise Failed("quota", f"the budget of this {period} is used up: {self._bound} requests")

    def take(self) -> None:
        """One request is sent now. Failed("quota") where nothing is left."""
        self.check()
        self._used += 1
        self.requests += 1

    def _today(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).date().isoformat()
