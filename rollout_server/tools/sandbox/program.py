"""Runs inside the sandbox: sets limits on its process, then runs the policy's program in it.

    python -I -S -B -c "<text of this file>" CPU_S MEMORY_MB FILE_MB THREADS [LIBRARY ..] < source

The text is passed on the command line, so that the directory of this file need not be visible in the sandbox. The first
line on stdout is READY; before it the program has not started. Startup dominates the cost of a call, so this file
imports only what it needs, and only from the standard library.
"""

from __future__ import annotations

import io
import os
import resource
import sys

READY = b"ready\n"
NAME = "program.py"
"""Name of the program in tracebacks."""


def main() -> None:
    cpu_s, memory_mb, file_mb, threads = map(int, sys.argv[1:5])
    source = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.path += sys.argv[5:]
    sys.argv = [""]
    os.environ.clear()
    os.nice(10)
    for limit, soft, hard in (
        (resource.RLIMIT_AS, memory_mb << 20, memory_mb << 20),
        # the soft limit is reached first: its signal differs from a kill
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, file_mb << 20, file_mb << 20),
        # plus one for the first process of the sandbox
        (resource.RLIMIT_NPROC, threads + 1, threads + 1),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    _leave_keyring()
    os.write(1, READY)
    run(source)


def _leave_keyring() -> None:
    """Join a new session keyring: otherwise a program could read the server's keys, in any namespace."""
    import ctypes

    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is not None and ctypes.CDLL(None).syscall(keyctl, 1, None) < 0:
        raise OSError("no separate session keyring")


def run(source: str) -> None:
    """Run `source` as `__main__`. An exception is printed with the program's traceback, and ends this process.

    Returns at the end of the program; the interpreter then joins threads and flushes streams as usual.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # line-buffered, so that the output of a killed program is not lost
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    # a new module, in which dataclasses and pickle look up names; this one is still running and must stay alive
    _this, sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
    try:
        exec(compile(source, NAME, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            text = _traceback(error, source)
        except MemoryError:  # no memory is left
            text = f"{type(error).__name__}\n"
        sys.stderr.write(text)
        sys.exit(1)


def _traceback(error: BaseException, source: str) -> str:
    """Format `error` without the frames of libraries: their paths are useless to the policy."""
    import linecache  # imported only now: it takes as long as the start of the sandbox
    import traceback

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    formatted = traceback.TracebackException.from_exception(error, compact=True)
    formatted.stack = traceback.StackSummary.from_list([f for f in formatted.stack if f.filename == NAME][-8:])
    return "".join(formatted.format(chain=False))


if __name__ == "__main__":
    main()
