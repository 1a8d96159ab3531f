"""Time limits that do not count the time in which this process stood still.

A suspended process, a blocked event loop or a stopped machine finds its timers due before it has read what waits in its
sockets. A limit on the silence of a peer must not blame the peer for that: `LoopClock` stands still with its loop, and
`LoopTimer` and `loop_timeout` measure by it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICK_S = 0.25
"""Interval of the clock's ticks, in seconds."""
LATE_S = 0.25
"""A tick later than this means that the loop stood still."""
GRACE_S = 0.5
"""Minimum time to read the waiting data after a standstill, in seconds."""

_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = weakref.WeakKeyDictionary()


class LoopClock:
    """Clock of one event loop without its standstills, exact to TICK_S + LATE_S. Ticks while a LoopTimer is armed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)  # a strong reference would keep the key of `_clocks` alive
        self._tick_due = loop.time() + TICK_S
        self._stood_still_s = 0.0
        self._users = 0
        self._handle: asyncio.TimerHandle | None = None

    @staticmethod
    def current() -> LoopClock:
        """Return the clock of the running loop."""
        loop = asyncio.get_running_loop()
        clock = _clocks.get(loop)
        if clock is None:
            clock = _clocks[loop] = LoopClock(loop)
        return clock

    def time(self) -> float:
        """Return seconds, comparable only with other times of this clock."""
        now: float = self._loop.time()
        # a timer may run before the late tick in the same iteration of the loop
        late = now - self._tick_due if self._handle is not None else 0.0
        return now - self._stood_still_s - (late if late > LATE_S else 0.0)

    def hold(self) -> None:
        """Keep the clock ticking until `release`."""
        self._users += 1
        if self._handle is None:
            self._schedule()

    def release(self) -> None:
        """End one `hold`."""
        self._users -= 1

    def _schedule(self) -> None:
        self._tick_due = self._loop.time() + TICK_S
        self._handle = self._loop.call_at(self._tick_due, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._tick_due
        self._stood_still_s += late if late > LATE_S else 0.0
        self._handle = None
        if self._users:
            self._schedule()


class LoopTimer:
    """Calls `expired` once, after the armed time by `LoopClock`. After a standstill not before GRACE_S."""

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired, self._loop, self.clock = expired, asyncio.get_running_loop(), LoopClock.current()
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0

    def arm(self, seconds: float) -> None:
        """Expire in `seconds`, instead of an earlier setting."""
        self.cancel()
        self.clock.hold()
        self._due = self.clock.time() + seconds
        self._handle = self._loop.call_later(seconds, self._fire)

    def cancel(self) -> None:
        """Do not expire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self.clock.release()

    def _fire(self) -> None:
        left = self._due - self.clock.time()
        if left > 1e-3:
            self._handle = self._loop.call_later(max(left, GRACE_S), self._fire)
            return
        self.cancel()
        self._expired()


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, but measured by `LoopClock`. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        timer = LoopTimer(lambda: scope.reschedule(loop.time()))
        timer.arm(seconds)
        try:
            yield scope
        finally:
            timer.cancel()
