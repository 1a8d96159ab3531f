"""Progress lines: what a command waits for, after `every_s` seconds of silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
EVERY_S, LOOK_S = 5.0, 0.05


class Pulse:
    """`say` passes lines on; `beat` says what goes on when nothing was said for `every_s` seconds."""

    def __init__(self, say: Say, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self._said = clock()

    def say(self, line: str) -> None:
        """One line for a person, at once."""
        self._said = self._clock()
        self._say(line)

    def beat(self, line: Callable[[], str], *, every_s: float | None = None) -> None:
        """`line()`, if it is time for one. Call it in every turn of a loop that waits."""
        if self._clock() - self._said >= (self._every_s if every_s is None else every_s):
            self.say(line())


def beside(work: Callable[[], T], look: Callable[[], None]) -> T:
    """The result of `work`, which runs in a thread while `look` is called now and then; raises what either raises."""
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
