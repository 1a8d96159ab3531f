"""Running the policy's program in this interpreter, which is confined by now."""

from __future__ import annotations

import io
import linecache
import sys
import traceback
from types import ModuleType

NAME = "program.py"


def run(source: str) -> None:
    """Run `source` as `__main__`; what it raises is printed as a traceback of its own lines, and ends this process.

    Returns when the program is through: the interpreter then ends as any does, threads joined and streams flushed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # by lines, so that a program that is killed has said what it said
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    # a module of its own, where dataclasses and pickle look names up; the jail's must stay, it is still running
    _jail, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        exec(compile(source, NAME, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stderr.write(_explain(error))
        sys.exit(1)


def _explain(error: BaseException) -> str:
    """The traceback without the frames of libraries, whose paths are this machine's and say nothing to a policy."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename == NAME][-8:])
    return "".join(told.format(chain=False))
