"""Pauses between retries, and time limits that do not count the time in which this process stood still.

A suspended process, a blocked event loop or a stopped machine finds its timers due before it has read what waits in its
sockets. A limit on the silence of a peer must not blame the peer for that: `LoopClock` stands still with its loop, and
`LoopTimer` and `loop_timeout` measure by it.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

TICK_S = 0.25
"""Interval of the clock's ticks, in seconds."""
LATE_S = 0.25
"""A tick later than this means that the loop stood still."""
GRACE_S = 0.5
"""Time to read the waiting data after a standstill, in seconds of the clock."""
PATIENCE = 5.0
"""A limit on what computes is this many times the longest that it has taken recently, and at least a floor."""

_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = weakref.WeakKeyDictionary()


class LoopClock:
    """Clock of one event loop without its standstills, exact to TICK_S + LATE_S.

    Ticks while a LoopTimer is armed, and within `ticking`; otherwise it counts standstills too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)  # a strong reference would keep the key of `_clocks` alive
        self._tick_due = loop.time() + TICK_S
        self._stood_still_s = 0.0
        self._woke_at = -math.inf
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
        # a timer may run before the late tick in the same iteration of the loop
        return float(self._loop.time() - self._stood_still_s - self._late_s())

    @property
    def just_woke(self) -> bool:
        """Whether the last standstill has ended less than GRACE_S ago."""
        return self._late_s() > 0.0 or self.time() - self._woke_at < GRACE_S

    def _late_s(self) -> float:
        """Return the length of a standstill that the next tick will count, in seconds."""
        late = self._loop.time() - self._tick_due if self._handle is not None else 0.0
        return late if late > LATE_S else 0.0

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
        late = self._late_s()
        self._stood_still_s += late
        self._handle = None
        if late:
            self._woke_at = self.time()
        if self._users:
            self._schedule()


@contextmanager
def ticking() -> Iterator[LoopClock]:
    """Yield the clock of the running loop, and keep it ticking."""
    clock = LoopClock.current()
    clock.hold()
    try:
        yield clock
    finally:
        clock.release()


class LoopTimer:
    """Calls `expired` once, after the armed time by `LoopClock`. If that ends in a standstill, GRACE_S later."""

    def __init__(self, expired: Callable[[], None]) -> None:
        self._expired, self._loop, self.clock = expired, asyncio.get_running_loop(), LoopClock.current()
        self._handle: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._graced = False

    @property
    def left_s(self) -> float:
        """Seconds to the expiry."""
        return self._due - self.clock.time()

    def arm(self, seconds: float) -> None:
        """Expire in `seconds`, instead of an earlier setting."""
        self.cancel()
        self.clock.hold()
        self._graced, self._due = False, self.clock.time() + seconds
        self._handle = self._loop.call_later(seconds, self._fire)

    def cancel(self) -> None:
        """Do not expire."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self.clock.release()

    def _fire(self) -> None:
        if self.left_s <= 1e-3 and self.clock.just_woke and not self._graced:
            # once: a loop that stands still again and again must not excuse its peers for ever
            self._graced, self._due = True, self.clock.time() + GRACE_S
        if self.left_s > 1e-3:
            self._handle = self._loop.call_later(self.left_s, self._fire)
            return
        self.cancel()
        self._expired()


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncIterator[LoopTimer]:
    """Like `asyncio.timeout`, but by `LoopClock`; yields the timer, which can be re-armed. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        timer = LoopTimer(lambda: scope.reschedule(loop.time()))
        timer.arm(seconds)
        try:
            yield timer
        finally:
            timer.cancel()


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after `failures` failures in a row, in seconds: first_s, doubling up to longest_s.

    Bounded for any number of failures: `2**failures` itself overflows a float at 1,024.
    """
    return min(longest_s, first_s * 2.0 ** min(max(0, failures - 1), 64))
