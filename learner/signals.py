"""How the learner is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """What SIGTERM and SIGINT mean: before training, the end at once; during it, the end after the present step."""

    def __init__(self) -> None:
        self.training = False
        self._told = threading.Event()

    def is_set(self) -> bool:
        return self._told.is_set()

    def tell(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. A second SIGINT interrupts whatever is going on."""
        if not self.training:
            raise SystemExit(0)
        if self._told.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._told.set()


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handlers for the time of the block; none outside the main thread, where Python allows none."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
