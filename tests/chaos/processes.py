"""The lives of one process: each start is a life with its own log."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Life:
    """One start of a process until its end. `status`: exit status, negative for a signal, None while it lives."""

    name: str
    number: int
    pid: int
    handle: int
    log: Path
    began: float
    status: int | None = None
    ended: float = 0.0
    doomed: str = ""
    """The fault that may end it; an end without one is a finding."""

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process; False if it has ended."""
        if self.status is not None or self.handle < 0:
            return False
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """Frees the handle."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


@dataclass
class Ward:
    """A supervised process: `start` begins a life, `look` detects its end and begins the next one.

    wanted   False: held down by a fault
    lives    all of them, oldest first
    """

    name: str
    begin: Callable[[], int]
    end_of: Callable[[int], int | None]
    logs: Path
    pause_s: float = 0.3
    wanted: bool = True
    lives: list[Life] = field(default_factory=list)
    _due: float = 0.0

    @property
    def life(self) -> Life:
        """The present life (of two, the later one), or the last one."""
        living = [life for life in self.lives if life.status is None]
        return (living or self.lives)[-1]

    @property
    def alive(self) -> bool:
        """Whether it runs (stopped processes do)."""
        return any(life.status is None for life in self.lives)

    def next_log(self) -> Path:
        """The log of the next life."""
        return self.logs / f"{self.name}.{len(self.lives) + 1:04d}.log"

    def start(self) -> Life:
        """Begins a life."""
        log = self.next_log()
        return self.adopt(self.begin(), log)

    def adopt(self, pid: int, log: Path) -> Life:
        """Replace the present process by a running one; supervise the old one until it ends."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            handle = -1  # it has ended already
        life = Life(self.name, len(self.lives) + 1, pid, handle, log, time.time())
        self.lives.append(life)
        return life

    def look(self) -> list[Life]:
        """Return the lives that have just ended; start the next one when it is due."""
        ended = []
        for life in self.lives:
            if life.status is None and (status := self.end_of(life.pid)) is not None:
                life.status, life.ended = status, time.time()
                life.close()
                ended.append(life)
        if ended and not self.alive:
            self._due = time.monotonic() + self.pause_s
        elif self.lives and not self.alive and self.wanted and time.monotonic() >= self._due:
            self.start()
        return ended


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the driver ends for any reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
