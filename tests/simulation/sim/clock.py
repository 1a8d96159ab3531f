"""Virtual time and the scheduler: one mover runs at a time, chosen by the seed among those that are ready.

A mover is a thread of a learner (`Fiber`), the event loop of a rollout server, or the fault plan. Threads are real, so
that product code runs unchanged, but only the thread with the baton runs, and returns it wherever it would wait. Time
does not advance while a mover is ready, and then jumps to the next moment at which one is.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

MOST_MOVES = 60_000
"""Maximum moves of a schedule: more mean an endless loop."""


class Killed(BaseException):
    """The simulated process is dead: its threads unwind without effect."""


class Stuck(AssertionError):
    """The schedule does not end."""


class Mover(Protocol):
    """Something that the scheduler can run."""

    process: Process

    def ready(self, now: float) -> bool: ...
    def wake_at(self) -> float: ...
    def move(self) -> None: ...


class Process:
    """A simulated operating-system process: alive or not, stopped (SIGSTOP) until a moment, with its own clocks.

    monotonic, wall  offsets of its clocks from virtual time, in seconds
    """

    def __init__(self, name: str, *, monotonic: float = 0.0, wall: float = 0.0) -> None:
        self.name, self.monotonic, self.wall = name, monotonic, wall
        self.alive = True
        self.stopped_until = -math.inf
        self.fibers: list[Fiber] = []

    def __repr__(self) -> str:
        return self.name


class Clock:
    """The scheduler. `current` is the process whose turn it is, `fiber` its thread (None: its event loop)."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.moves, self.most_moves = 0, MOST_MOVES
        self.movers: list[Mover] = []
        self.current: Process | None = None
        self.fiber: Fiber | None = None
        self.lines: deque[str] = deque(maxlen=4000)
        self.broken: BaseException | None = None
        self._baton = threading.Lock()
        self._baton.acquire()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbered = 0

    def tell(self, text: str) -> None:
        """A line of the schedule's log."""
        who = self.current.name if self.current else "-"
        self.lines.append(f"{self.now:9.3f} {who:<4} {text}")

    def violated(self, text: str) -> None:
        """An invariant does not hold: the schedule ends (always raised in the scheduler)."""
        self.tell(f"VIOLATION {text}")
        if self.broken is None:
            self.broken = AssertionError(text)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Calls `act` at virtual time `when`, between two moves."""
        self._numbered += 1
        heapq.heappush(self._events, (when, self._numbered, act))

    # --- called by threads of processes ---

    def wait(self, until: float, ready: Callable[[], bool] | None = None) -> None:
        """Return the baton until virtual time `until` or `ready()`. Raises Killed if the process has died."""
        fiber = self.fiber
        assert fiber is not None, "only threads of a learner may stand still"
        if not fiber.process.alive:
            raise Killed
        fiber.until, fiber.condition = until, ready
        self._baton.release()
        fiber.lock.acquire()
        if not fiber.process.alive:
            raise Killed

    def maybe_switch(self, chance: float) -> None:
        """Another thread may go first here."""
        if self.fiber is not None and self.rng.random() < chance:
            self.wait(self.now)

    # --- called by the scheduler ---

    def resume(self, fiber: Fiber) -> None:
        """Lets a thread run to its next wait."""
        self.current, self.fiber = fiber.process, fiber
        fiber.lock.release()
        self._baton.acquire()
        self.current = self.fiber = None

    def give_back(self) -> None:
        """A thread has ended."""
        self._baton.release()

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Run moves until `until()`. Return False if virtual time reached `deadline` first."""
        while not until():
            if not self._step(deadline):
                return False
            if self.broken is not None:
                raise self.broken
        return True

    def _step(self, deadline: float) -> bool:
        now = self.now
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()
            return True
        ready = [m for m in self.movers if m.process.stopped_until <= now and m.ready(now)]
        if ready:
            self.moves += 1
            if self.moves > self.most_moves:
                raise Stuck(f"{self.most_moves} moves and no end, at {now:.1f} s")
            (ready[0] if len(ready) == 1 else self.rng.choice(ready)).move()
            return True
        moments = [max(m.wake_at(), m.process.stopped_until) for m in self.movers]
        if self._events:
            moments.append(self._events[0][0])
        following = min(moments, default=math.inf)
        if following > deadline:
            return False
        self.now = max(now, following)
        return True

    def kill(self, process: Process) -> None:
        """Kill a process like SIGKILL; its threads unwind without effect."""
        process.alive = False
        for fiber in process.fibers:
            while not fiber.done:
                self.resume(fiber)
        self.movers = [m for m in self.movers if m.process is not process]


class Fiber:
    """One thread of a simulated process."""

    def __init__(self, clock: Clock, process: Process, target: Callable[[], Any], name: str) -> None:
        self.clock, self.process, self.name = clock, process, name
        self.until = clock.now
        self.condition: Callable[[], bool] | None = None
        self.done = False
        self.lock = threading.Lock()
        self.lock.acquire()
        self._target = target
        process.fibers.append(self)
        clock.movers.append(self)
        self._thread = threading.Thread(target=self._run, name=f"{process.name}-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.lock.acquire()
        try:
            if self.process.alive:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            self.clock.violated(f"thread {self.name} of {self.process} broke: {type(error).__name__}: {error}")
        finally:
            self.done = True
            if self in self.clock.movers:
                self.clock.movers.remove(self)
            self.clock.give_back()

    def ready(self, now: float) -> bool:
        return now >= self.until or (self.condition is not None and self.condition())

    def wake_at(self) -> float:
        return self.until

    def move(self) -> None:
        self.clock.resume(self)
