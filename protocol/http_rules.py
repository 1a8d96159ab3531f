"""One decision on every HTTP request, before its body is read: all services and the embedded engine ask for it.

    401, 403  tokens and roles, where tokens are set (`protocol.access`)
    403       without a token: a `Host` that is no loopback name (DNS rebinding), a page of another origin
    415       without a token: a body that is not `application/json`, the only kind that a page cannot send to another
              origin without a CORS preflight
    415       a compressed body: a megabyte of it could hold a gigabyte

Pure; knows no HTTP library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from protocol.access import MAY, OPEN, Access, Role, is_loopback, variable

SERVER_OPTIONS: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": 1.0}
"""`handler_args` of every aiohttp application. By default aiohttp inflates bodies, also those that nothing reads: after
an early answer it goes on for 10 s."""
JSON = "application/json"
OWN_SITES = frozenset({"", "none", "same-origin"})
"""Values of `Sec-Fetch-Site` that are let in: no browser, an address typed by hand, a page of the service itself."""


class Headers(Protocol):
    """A request's headers; names are found in any case."""

    def get(self, name: str, default: str, /) -> str: ...


class Asked(NamedTuple):
    """A request as far as it is known before its body is read."""

    path: str
    headers: Headers


class Verdict(NamedTuple):
    """What to answer: status 0 lets the request pass, else 401, 403 or 415 with `message`."""

    status: int = 0
    message: str = ""


PASS = Verdict()


def decide(asked: Asked, *, needs: Role, access: Access) -> Verdict:
    """Whether a request, to a route for `needs`, may pass."""
    if asked.path in OPEN:
        return PASS
    if not access.open:
        role = access.role_of(asked.headers.get("Authorization", ""))
        if role is None:
            return Verdict(401, f"a token is needed: Authorization: Bearer <{variable(needs)}>")
        if role not in MAY[needs]:
            return Verdict(403, f"this needs the role {needs}, the token is of {role}")
    return check_request(asked, is_open=access.open)


def check_request(asked: Asked, *, is_open: bool) -> Verdict:
    """Whether a request may pass, whoever sends it.

    is_open  the service asks for no token: a web page in a browser of this machine must not use it
    """
    headers = asked.headers
    if is_open:
        if not _names_loopback(headers.get("Host", "")):
            return Verdict(403, "without tokens only loopback names are answered")
        if not _is_own_page(headers):
            return Verdict(403, "without tokens no page of another origin is answered")
    if headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        return Verdict(415, "a compressed body is not read: send it without Content-Encoding")
    if is_open and _has_body(headers) and headers.get("Content-Type", "").partition(";")[0].strip().lower() != JSON:
        return Verdict(415, f"without tokens a body must be JSON: send Content-Type: {JSON}")
    return PASS


def _names_loopback(header: str) -> bool:
    return not header or _is_loopback_url(f"//{header}")


def _is_own_page(headers: Headers) -> bool:
    origin = headers.get("Origin", "")
    return headers.get("Sec-Fetch-Site", "").lower() in OWN_SITES and (not origin or _is_loopback_url(origin))


def _is_loopback_url(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _has_body(headers: Headers) -> bool:
    return bool(headers.get("Transfer-Encoding", "") or headers.get("Content-Length", "").strip("0 "))
