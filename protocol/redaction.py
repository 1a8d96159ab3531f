"""Secrets never leave a process in words: what logs, error messages and tracebacks show goes through `redact`.

Two nets. Forms that are secret whatever they hold: the password in a URL, a bearer token. And the very values that
this process knows to be secret: those of environment variables that are named like one, and what is `remember`ed.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO
from urllib.parse import quote, unquote, urlsplit

SHOWN = "[secret]"
SHORTEST = 8
"""Characters: a shorter value is a word that texts hold by chance; to cut it out would harm them."""
SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS?|REDISCLI_AUTH)$", re.IGNORECASE)
"""Names of environment variables whose values are secrets."""
_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@:]*):[^\s/?#]*@")
_STANDS_IN = r"\$\([a-z][\w./-]*\s|(?:\$\{?[A-Z_][A-Z0-9_]*\}?|\.{2,3})(?=[\s'\"&]|$)"
"""What advice writes in the place of a secret: a command that makes one, a variable that holds one, or dots."""
_PARAMETER = re.compile(rf"((?i:password|passwd|api_?key|token|secret)=)(?!{_STANDS_IN})[^&\s'\"]+")
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)

LOG_LEVEL_VARIABLE = "FORAY_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_known: set[str] = set()


def remember(secret: str) -> None:
    """From now on `secret` is cut out of every text that this process shows, as it is and as escaped in URLs, JSON."""
    if len(secret) >= SHORTEST:
        _known.update((secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1]))


def remember_environment(environ: Mapping[str, str]) -> None:
    """Remembers the values of variables that are named like secrets, and the passwords of URLs in any of them."""
    for name, value in environ.items():
        if is_secret_name(name):
            remember(value)
        elif "://" in value and "@" in value:
            for password in _passwords(value):
                remember(password)
                remember(unquote(password))


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """`text` as it may be shown."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, SHOWN)
    text = _URL_PASSWORD.sub(rf"\1:{SHOWN}@", text)
    return _BEARER.sub(rf"\1{SHOWN}", _PARAMETER.sub(rf"\1{SHOWN}", text))


class RedactingFormatter(logging.Formatter):
    """Lines of a log, tracebacks included, as they may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def start_logging(environ: Mapping[str, str], line: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Logs to `stream` (stderr) from `level` on in the form `line`; all that this process shows is redacted from now.

    FORAY_LOG_LEVEL in `environ` overrules `level`.

    An exception that nobody catches is printed by the interpreter itself: that, too, goes through `redact`.
    """
    remember_environment(environ)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RedactingFormatter(line))
    handler.addFilter(without_trace_of_clients)
    wanted = environ.get(LOG_LEVEL_VARIABLE, level)
    logging.basicConfig(level=wanted if wanted in LOG_LEVELS else level, handlers=[handler])
    sys.excepthook = _print_redacted


def without_trace_of_clients(record: logging.LogRecord) -> bool:
    """A filter: bytes that are no HTTP, which anybody may send, and clients that leave, are one line and no traceback
    of forty."""
    error = record.exc_info[1] if record.exc_info else None
    theirs = type(error).__module__ == "aiohttp.http_exceptions" or type(error).__name__ == "RequestPayloadError"
    if record.name == "aiohttp.server" and (theirs or isinstance(error, ConnectionError)):
        record.msg, record.args = f"{record.getMessage()}: {' '.join(str(error).split())[:120]}", ()
        record.exc_info = record.exc_text = None
    return True


def _print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _passwords(value: str) -> list[str]:
    found = []
    for url in value.split():
        try:
            password = urlsplit(url).password
        except ValueError:
            continue
        found += [password] if password else []
    return found
