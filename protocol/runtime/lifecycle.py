"""Shutdown: handle SIGTERM and SIGINT in a service and in the learner, and unwrap UserErrors of task groups.

A process is identified by a token, HOST:PID:START, because pids are reused and differ between machines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from protocol.errors import UserError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class ShutdownSignal:
    """The shutdown request of a service with an event loop.

    requested  finish the work in flight, then exit
    forced     a second signal arrived: exit now
    """

    requested: asyncio.Event = field(default_factory=asyncio.Event)
    forced: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def shutdown_on_signals(shutdown: ShutdownSignal | None = None) -> Iterator[ShutdownSignal]:
    """Set `shutdown` on SIGTERM and SIGINT while the block runs; remove the handlers afterwards."""
    loop, shutdown = asyncio.get_running_loop(), shutdown or ShutdownSignal()

    def on_signal(name: str) -> None:
        if shutdown.requested.is_set():
            log.warning("received a second %s", name)
            shutdown.forced.set()
        else:
            log.info("%s: stopping", name)
            shutdown.requested.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield shutdown
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


class DeferredShutdown:
    """The shutdown of a process without an event loop: immediate, or if `deferred` when the process reads `is_set`.

    number  the last signal that arrived, 0 if none
    """

    def __init__(self) -> None:
        self.deferred = False
        self.number = 0
        self._requested = threading.Event()

    def is_set(self) -> bool:
        """Return whether a signal has arrived since `deferred` was set."""
        return self._requested.is_set()

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, 0 without one: work that was interrupted is not done."""
        return 128 + self.number if self.number else 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second SIGINT raises KeyboardInterrupt wherever the process is."""
        if not self.deferred:
            raise SystemExit(128 + number)
        if self._requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        self._requested.set()


@contextmanager
def deferred_shutdown() -> Iterator[DeferredShutdown]:
    """Handle SIGTERM and SIGINT while the block runs. Does nothing outside the main thread (a rule of Python)."""
    shutdown = DeferredShutdown()
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    before = {number: signal.signal(number, shutdown.on_signal) for number in SIGNALS}
    try:
        yield shutdown
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Terminated(SystemExit):
    """A SIGTERM, where `terminating` handles it: what the command holds is closed as after Ctrl-C."""


@contextmanager
def terminating() -> Iterator[None]:
    """Raise Terminated in the main thread on SIGTERM while the block runs. A block inside may handle it instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unwrap_user_error() -> Iterator[None]:
    """Re-raise the first UserError of an exception group by itself, so that the command line can print it."""
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


def terminate_at_end_of_stdin() -> None:
    """Send SIGTERM to this process when its standard input ends: with the program that holds the other end."""

    def wait(pipe: int) -> None:
        while os.read(pipe, 1 << 16):  # no buffered reader: its lock would be held at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, args=(sys.stdin.fileno(),), name="stdin", daemon=True).start()


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended. How they end is ignored."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def process_token() -> str:
    """Return the token of this process."""
    return f"{place()}:{os.getpid()}:{_started(os.getpid())}"


def place() -> str:
    """Return host and process namespace: a pid is meaningful only within both."""
    # hosts may share a name, and the first namespace has the same number on every host: the boot id tells them apart
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        namespace = boot = "?"
    return f"{socket.gethostname()}/{namespace}/{boot}".replace(":", "")


def _started(pid: int) -> str:
    # Start time in clock ticks since boot: distinguishes a process from a later one with the same pid.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def pid_here(token: str) -> int | None:
    """Return the pid in a token, None if the process is not known to be of this machine. It may have ended."""
    parts = token.split(":")
    known = len(parts) >= 3 and parts[0] == place() and parts[1].isdecimal() and bool(parts[2])
    return int(parts[1]) if known else None


def has_ended(token: str) -> bool:
    """Return whether the process was one of this machine and has ended; False if unknown."""
    pid = pid_here(token)
    return pid is not None and _started(pid) != token.split(":")[2]


def memory_available() -> int | None:
    """Return the bytes available to a new process: the kernel's estimate, or the rest of the control group's limit.

    None if unknown, as on macOS.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        left = int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return left if free is None else min(free, left)


def require_linux(what: str) -> None:
    """Raise UserError on another system: processes are ended with their parents by prctl, pidfd and /proc."""
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"{what} needs Linux, this is {sys.platform}",
            why="prctl, pidfd and /proc end each process together with the one that started it",
            todo="run it in a Linux container or virtual machine",
        )
