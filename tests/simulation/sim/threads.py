"""Replacements of the modules `threading`, `time` and `random` for product code, in virtual time.

A thread may hand over to another one at each lock, which adds interleavings that Redis calls alone would not show.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from sim.clock import Clock, Fiber

SWITCH = 0.03
"""Probability that a thread hands over when it takes a lock."""


class RLock:
    """A lock that its owner may take again."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._depth = clock, 0
        self._owner: Fiber | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        clock = self._clock
        if self._depth == 0:
            clock.maybe_switch(SWITCH)
        me = clock.fiber
        while self._depth and self._owner is not me:
            assert me is not None, "the scheduler may not wait for a lock"
            clock.wait(math.inf, lambda: self._depth == 0)
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 0
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Event:
    """threading.Event."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._flag = clock, False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            clock = self._clock
            clock.wait(math.inf if timeout is None else clock.now + max(0.0, timeout), self.is_set)
        return self._flag


class Condition:
    """threading.Condition over an RLock of ours."""

    def __init__(self, clock: Clock, lock: RLock | None = None) -> None:
        self._clock, self._lock = clock, lock or RLock(clock)
        self._told = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        self._told += 1

    def notify(self, n: int = 1) -> None:
        self._told += 1

    def wait(self, timeout: float | None = None) -> bool:
        clock, before = self._clock, self._told
        depth = self._lock._release_save()
        until = math.inf if timeout is None else clock.now + max(0.0, timeout)
        try:
            clock.wait(until, lambda: self._told != before)
        finally:
            self._lock._acquire_restore(depth)
        return self._told != before

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        clock = self._clock
        until = math.inf if timeout is None else clock.now + timeout
        while not (result := predicate()) and clock.now < until:
            self.wait(None if timeout is None else until - clock.now)
        return result


class Thread:
    """threading.Thread of the process that makes it."""

    def __init__(
        self, clock: Clock, target: Callable[..., Any], name: str = "", args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        assert clock.current is not None
        self._clock, self._process, self.name = clock, clock.current, name
        self._call = lambda: target(*args)
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = Fiber(self._clock, self._process, self._call, self.name)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.done

    def join(self, timeout: float | None = None) -> None:
        clock, fiber = self._clock, self._fiber
        if fiber is not None and not fiber.done:
            clock.wait(math.inf if timeout is None else clock.now + timeout, lambda: fiber.done)


class Threading:
    """In place of the module `threading`. `clock` is the one of the present schedule."""

    clock: Clock

    def Lock(self) -> RLock:
        return RLock(self.clock)

    def RLock(self) -> RLock:
        return RLock(self.clock)

    def Event(self) -> Event:
        return Event(self.clock)

    def Condition(self, lock: RLock | None = None) -> Condition:
        return Condition(self.clock, lock)

    def Thread(self, *_: object, target: Callable[..., Any], **more: Any) -> Thread:
        return Thread(self.clock, target, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Time:
    """In place of the module `time`: each process has a monotonic and a wall clock of its own."""

    clock: Clock

    def monotonic(self) -> float:
        process = self.clock.current
        return self.clock.now + (process.monotonic if process else 0.0)

    perf_counter = monotonic

    def time(self) -> float:
        process = self.clock.current
        return 1.6e9 + self.clock.now + (process.wall if process else 0.0)

    def sleep(self, seconds: float) -> None:
        self.clock.wait(self.clock.now + max(0.0, seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Random:
    """In place of the module `random`: draws from the schedule's seed."""

    clock: Clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clock.rng if name in ("random", "uniform", "choice", "expovariate") else random, name)
