"""Logging of every process: one line format; secrets are redacted in lines and tracebacks."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from protocol.redaction import for_terminal, remember_environment

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_LEVEL_VARIABLE = "FORAY_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class RedactingFormatter(logging.Formatter):
    """Format log lines and tracebacks, with secrets redacted and control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


def start_logging(
    environ: Mapping[str, str], line: str = LOG_FORMAT, *, level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Log to `stream` (stderr) at `level` and above in the format `line`, with secrets redacted.

    FORAY_LOG_LEVEL in `environ` overrides `level`. Tracebacks of uncaught exceptions, which the interpreter prints, are
    redacted too.
    """
    remember_environment(environ)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RedactingFormatter(line))
    handler.addFilter(without_trace_of_clients)
    wanted = environ.get(LOG_LEVEL_VARIABLE, level)
    logging.basicConfig(level=wanted if wanted in LOG_LEVELS else level, handlers=[handler])
    sys.excepthook = _print_redacted


def without_trace_of_clients(record: logging.LogRecord) -> bool:
    """Log filter. Shorten a record to one line if a client disconnected or sent bytes that are not HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    theirs = type(error).__module__ == "aiohttp.http_exceptions" or type(error).__name__ == "RequestPayloadError"
    if record.name == "aiohttp.server" and (theirs or isinstance(error, ConnectionError)):
        record.msg, record.args = f"{record.getMessage()}: {' '.join(str(error).split())[:120]}", ()
        record.exc_info = record.exc_text = None
    return True


def _print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(for_terminal("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
