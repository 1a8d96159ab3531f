"""A small process between a node and its engine that guarantees the end of the engine's process tree.

    node ==stdin, a pipe==> guard --fork--> engine --> schedulers, detokenizers, other children
                              ^                                            |
                              +------- orphans of the tree become its children (subreaper)

An engine is a tree of processes that can outlive their parents: a signal to the first does not end the others. The
guard waits for one of two events. If the engine exits, the guard kills its remaining children and exits with its status
(128 + n for signal n). If the pipe is closed, which happens however the node ends, the guard kills the whole tree.
SIGTERM is forwarded to the engine only, which ends its children itself.

Run as a script, by path. It imports nothing from Foray, so it starts in milliseconds. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_START = 127
SWEEP_S = 5.0
"""Timeout for a killed tree to disappear: only a process in an uninterruptible system call takes time."""


def main(argv: list[str]) -> int:
    """Run `argv` as the engine until it exits or stdin is closed. Return the guard's exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped guard could not see the pipe close
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # to stop the engine, signal the node
    engine = os.fork()
    if engine == 0:
        _become(argv, libc)
    signal.signal(signal.SIGTERM, lambda *_: _signal(engine, signal.SIGTERM))
    exited = os.pidfd_open(engine)
    waiting = select.poll()
    waiting.register(exited, select.POLLIN)
    waiting.register(0, select.POLLIN | select.POLLHUP)
    status: int | None = None
    while status is None:
        ready = {fd for fd, _ in waiting.poll()}
        if exited in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
        elif not os.read(0, 1):
            status = -signal.SIGKILL
    kill_below(os.getpid(), reap=True)
    return status if status >= 0 else 128 - status


def descendants(root: int) -> list[int]:
    """Return the ids of the processes below `root`, without zombies, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # "pid (name) state ppid ...": the name may contain any characters, also brackets
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it has exited
            children.setdefault(int(parent), []).append(0 if state in "ZX" else int(entry.name))
    found = [root]
    for pid in found:
        found += [child for child in children.get(pid, ()) if child]
    return found[1:]


def memory_mib(root: int) -> int:
    """Return the resident memory of `root` and the processes below it, in MiB: it grows while they start and load."""
    pages = 0
    for pid in (root, *descendants(root)):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it has exited
    return pages * os.sysconf("SC_PAGESIZE") >> 20


def cpu_s(root: int) -> float:
    """Return the seconds of CPU that `root` and the processes below it have used."""
    ticks = 0
    for pid in (root, *descendants(root)):
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        except (OSError, ValueError):
            continue  # it has exited
    return ticks / os.sysconf("SC_CLK_TCK")


class Growth:
    """Tells processes that still work from those that have stopped to: by memory or CPU time, whatever the time.

    patience_s  seconds without growth after which they have stopped, measured by `clock`
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._most = -1.0
        self._look_at = self.until = clock()
        """Time at which they have stopped working."""

    def has_ended(self, used: Callable[[], float]) -> bool:
        """Return whether what they use has not grown for patience_s. `used` returns it, for instance in MiB."""
        if (now := self._clock()) >= self._look_at:
            self._look_at, grown = now + self._patience_s / 20, used()
            if grown > self._most:
                self._most, self.until = grown, now + self._patience_s
        return now > self.until


def kill_below(root: int, *, reap: bool = False) -> None:
    """Send SIGKILL to all processes below `root` until none is left or SWEEP_S have passed. Works on stopped ones.

    reap  reap zombies, which only `root` itself can do
    """
    deadline = time.monotonic() + SWEEP_S
    while (found := descendants(root)) and time.monotonic() < deadline:
        for pid in found:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    if reap:
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there is no child


def _become(argv: list[str], libc: ctypes.CDLL) -> None:
    """Replace the forked process by the engine. Never returns."""
    try:
        # in a separate session: signals to the engine's process group do not reach the guard
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(CANNOT_START)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # already gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
