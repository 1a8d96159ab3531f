"""How a process of the rollout side starts and stops: signals, the port file, and errors out of a task group."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from protocol.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class Stop:
    """`asked`: finish what is in flight, then end. `hurry`: a second signal; end now."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` while the block runs; the handlers are removed afterwards."""
    loop = asyncio.get_running_loop()

    def heard(name: str) -> None:
        if stop.asked.is_set():
            log.warning("%s again: stopping at once", name)
            stop.hurry.set()
        else:
            log.info("%s: stopping", name)
            stop.asked.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, heard, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Lets a UserError out of a task group as itself, so that the command line can print it."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = group.subgroup(UserError)
        if found is None:
            raise
        error: BaseException = found
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


# How the learner is told to end.


class SignalsStop:
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
def stop_signals() -> Iterator[SignalsStop]:
    """Handlers for the time of the block; none outside the main thread, where Python allows none."""
    stop = SignalsStop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
