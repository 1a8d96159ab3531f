"""Text for logs and terminals: secrets redacted, control characters escaped. Logs, error messages and tracebacks pass
through `for_terminal`.

`redact` replaces text that has the form of a secret (the password in a URL, a bearer token), and values known to be
secret: those of environment variables with a secret's name, and those passed to `remember`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

SHOWN = "[secret]"
SHORTEST = 8
"""Minimum length of a remembered value, in characters: shorter ones occur in text by chance."""
SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS?|REDISCLI_AUTH)$", re.IGNORECASE)
"""Names of environment variables whose values are secrets."""
_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@:]*):[^\s/?#]*@")
_STANDS_IN = r"\$\([a-z][\w./-]*\s|(?:\$\{?[A-Z_][A-Z0-9_]*\}?|\.{2,3})(?=[\s'\"&]|$)"
"""Placeholders for a secret in advice: a command that makes one, a variable that holds one, or dots."""
_PARAMETER = re.compile(rf"((?i:password|passwd|api_?key|token|secret)=)(?!{_STANDS_IN})[^&\s'\"]+")
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)

_known: set[str] = set()


def remember(secret: str) -> None:
    """Redact `secret` in every text from now on, verbatim and as escaped in URLs and JSON."""
    if len(secret) >= SHORTEST:
        _known.update((secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1]))


def remember_environment(environ: Mapping[str, str]) -> None:
    """Remember the values of variables with a secret's name, and the passwords of URLs in any variable."""
    for name, value in environ.items():
        if is_secret_name(name):
            remember(value)
        elif "://" in value and "@" in value:
            for password in _passwords(value):
                remember(password)
                remember(unquote(password))


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable with this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """Return `text` with all secrets replaced by SHOWN."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, SHOWN)
    text = _URL_PASSWORD.sub(rf"\1:{SHOWN}@", text)
    return _BEARER.sub(rf"\1{SHOWN}", _PARAMETER.sub(rf"\1{SHOWN}", text))


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return `text` with non-printable characters, but for those in `keep`, as \xNN, \uNNNN or \UNNNNNNNN.

    Control characters could move the cursor, change the title or, in some terminals, type commands, and marks that
    reverse the direction of writing disguise text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(ord(c)) for c in text)


def _escaped(number: int) -> str:
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def for_terminal(text: str) -> str:
    """Return `text` as it may be printed or logged: redacted and printable."""
    return printable(redact(text))


def _passwords(value: str) -> list[str]:
    found = []
    for url in value.split():
        try:
            password = urlsplit(url).password
        except ValueError:
            continue
        found += [password] if password else []
    return found
