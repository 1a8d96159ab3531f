"""Between a node and its engine: a small process that ends the engine's whole tree, come what may.

    node ==stdin, a pipe==> guard --fork--> engine --> schedulers, detokenizers, whatever it forks
                              ^                                            |
                              +------- orphans of the tree become its children (subreaper)

An engine is a tree of processes that can outlive their parents: a signal to the first does not end the last. The
guard waits for two things: the engine exits (then what it left behind is killed, and the guard exits with its status,
128 + n for signal n), or the pipe ends, which it does when the node dies by whatever means (then all is killed).
SIGTERM is passed on to the engine alone, which ends its children as it sees fit.

Run as a script, by path: it imports nothing of Foray, so it is up in milliseconds. Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_START = 127
SWEEP_S = 5.0
"""How long a tree that is being killed may take to be gone: only a process in the kernel's hands takes time."""


def main(argv: list[str]) -> int:
    """Run `argv` as the engine; returns the guard's exit status. Waits for its end or for the end of stdin."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # were it stopped, it could not see the pipe end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # to end the engine, signal the node
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
    """Ids of the living processes below `root`, zombies left out, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # "pid (name) state ppid ...": the name may hold anything, also brackets
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # gone meanwhile
            children.setdefault(int(parent), []).append(0 if state in "ZX" else int(entry.name))
    found = [root]
    for pid in found:
        found += [child for child in children.get(pid, ()) if child]
    return found[1:]


def kill_below(root: int, *, reap: bool = False) -> None:
    """SIGKILL to everything below `root` until nothing is left or SWEEP_S have passed. Works on stopped processes.

    reap  collect the dead, which only `root` itself can
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
        pass  # no child is left


def _become(argv: list[str], libc: ctypes.CDLL) -> None:
    """In the fork: turn into the engine. Never returns."""
    try:
        # in a separate session: what is sent to the engine's group does not hit its guard
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
        pass  # gone already


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
