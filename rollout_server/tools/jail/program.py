"""Running the policy's program in this interpreter, which is confined by now."""

from __future__ import annotations

import io
import sys

NAME = "program.py"


def run(source: str) -> None:
    """Run `source` as `__main__`; what it raises is printed as a traceback of its own lines, and ends this process.

    Returns when the program is through: the interpreter then ends as any does, threads joined and streams flushed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # by lines, so that a program that is killed has said what it said
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    # a module of its own, where dataclasses and pickle look names up; the jail's must stay, it is still running
    _jail, sys.modules["__main__"] = sys.modules["__main__"], type(sys)("__main__")
    try:
        exec(compile(source, NAME, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            told = _explain(error, source)
        except MemoryError:  # of which the program has left nothing
            told = f"{type(error).__name__}\n"
        sys.stderr.write(told)
        sys.exit(1)


def _explain(error: BaseException, source: str) -> str:
    """The traceback without the frames of libraries, whose paths are this machine's and say nothing to a policy."""
    import linecache  # only now: they take as long to import as the jail takes to start
    import traceback

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    told = traceback.TracebackException.from_exception(error, compact=True)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename == NAME][-8:])
    return "".join(told.format(chain=False))
