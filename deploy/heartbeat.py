"""Progress lines: report what a command waits for after `every_s` seconds without output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
EVERY_S, LOOK_S = 5.0, 0.05


class Pulse:
    """Print lines with `say`; `beat` prints a progress line after `every_s` seconds without one."""

    def __init__(self, say: Say, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self._said = clock()

    def say(self, line: str) -> None:
        """Print one line immediately."""
        self._said = self._clock()
        self._say(line)

    def beat(self, line: Callable[[], str], *, every_s: float | None = None) -> None:
        """Print `line()` if it is time for one. Call this in every iteration of a waiting loop."""
        if self._clock() - self._said >= (self._every_s if every_s is None else every_s):
            self.say(line())


def beside(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Run `work` in a thread, call `look` periodically, and return the result. Raises what either raises."""
    result: list[T] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call, name="beside", daemon=True)
    thread.start()
    while thread.is_alive():
        look()
        thread.join(LOOK_S)
    if failure:
        raise failure[0]
    return result[0]
