"""Threads beside the training thread, and how they tell it of what only it can mend."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from learner.redis_client import RedisUnavailable
from protocol.errors import Fenced, StateLost, UserError

log = logging.getLogger(__name__)

MAX_PAUSE_S = 2.0
SILENCE_S = 15.0
"""Complaints about Redis come at most so often: some calls may work while others do not (a full Redis)."""


class Alarm:
    """The first fault that an I/O thread could not mend. While it stands, the I/O threads stand still."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.quiet = threading.Event()
        self.quiet.set()

    def sound(self, error: BaseException) -> None:
        """Raises the alarm; later ones are consequences and dropped."""
        with self._lock:
            if self._error is None:
                self._error = error
                self.quiet.clear()

    def check(self) -> None:
        """Raises the fault, if there is one."""
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """The fault is mended: the I/O threads go on."""
        with self._lock:
            self._error = None
            self.quiet.set()


class IoLoop:
    """Calls `turn` again and again in a thread of its own.

    A turn that finds Redis unavailable is repeated after a pause. StateLost, Fenced and UserError sound the alarm and
    the loop waits until the training thread has cleared it, perhaps for another thread's fault. Anything else sounds
    the alarm and ends the loop.
    Unblocked by: the turn's own waits, `alarm.clear`, `stop`.
    """

    def __init__(self, name: str, turn: Callable[[], None], alarm: Alarm) -> None:
        self._turn, self._alarm = turn, alarm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Ends the loop after its present turn."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures, told = 0, -SILENCE_S
        while not self._stop.is_set():
            if not self._alarm.quiet.wait(0.2):
                continue
            try:
                self._turn()
                failures = 0
            except RedisUnavailable as error:
                failures += 1
                if time.monotonic() > told + SILENCE_S:
                    told = time.monotonic()
                    log.warning("Redis is not available to the %s, trying again: %s", self._thread.name, error)
                self._stop.wait(min(MAX_PAUSE_S, 0.1 * 2**failures))
            except (StateLost, Fenced, UserError) as error:
                self._alarm.sound(error)
            except BaseException as error:
                log.exception("%s failed", self._thread.name)
                self._alarm.sound(error)
                return
