"""An asyncio event loop in virtual time. It never sleeps: the scheduler runs one iteration when one is due."""

from __future__ import annotations

import asyncio
import heapq
import math
from asyncio import events
from typing import Any

from sim.clock import Clock, Process


class _NoSockets:
    """The selector of a loop that has no sockets."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """A mover: `move` runs what is ready now, once."""

    def __init__(self, clock: Clock, process: Process) -> None:
        super().__init__()
        self._virtual, self.process = clock, process
        self._selector = _NoSockets()
        self._clock_resolution = 1e-9
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self._virtual.now + self.process.monotonic

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def wake_at(self) -> float:
        """Virtual time at which something is ready."""
        if self._ready:  # type: ignore[attr-defined]
            return self._virtual.now
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False  # as `_run_once` does
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        return timers[0]._when - self.process.monotonic if timers else math.inf

    def ready(self, now: float) -> bool:
        return bool(self._ready) or self.wake_at() <= now  # type: ignore[attr-defined]

    def move(self) -> None:
        clock = self._virtual
        clock.current = self.process
        events._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            events._set_running_loop(None)
            clock.current = None

    def shut(self) -> None:
        """The process is dead: every task unwinds. Its calls to Redis have no effect."""
        for _ in range(50):
            left = [t for t in asyncio.all_tasks(self) if not t.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.move()
            for _ in range(20):
                if not self._ready:  # type: ignore[attr-defined]
                    break
                self.move()
        self.close()
