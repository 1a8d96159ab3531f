"""HTTP requests to the services of a run, without an event loop. The token is never sent to a redirect target."""

from __future__ import annotations

import os
import urllib.request
from email.message import Message
from http.client import HTTPResponse
from typing import IO, Any, cast

from protocol.runtime.http.auth import Role, read_access
from protocol.runtime.http.body import parse_json

LARGEST_ANSWER = 16 << 20
"""Maximum bytes of an answer."""


class _StayHere(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Refuse redirects: Foray's services send none, and another process in their place could collect the token."""


_opener = urllib.request.build_opener(_StayHere)


def ask(url: str, *roles: Role, body: bytes | None = None, timeout_s: float, token: str = "") -> HTTPResponse:
    """Return the response of `url`, which the caller closes. POST JSON if there is a `body`, else GET.

    roles  send the token of the first role that this process has one for (`protocol.runtime.http.auth`)
    token  send this token of another service instead
    """
    headers = {"Authorization": f"Bearer {token}"} if token else read_access(os.environ).headers(*roles)
    headers |= {"Content-Type": "application/json"} if body else {}
    return cast(HTTPResponse, _opener.open(urllib.request.Request(url, data=body, headers=headers), timeout=timeout_s))


def read_json(response: HTTPResponse, max_bytes: int = LARGEST_ANSWER) -> Any:
    """Return the answer. Raises OSError, or ValueError if it is larger than max_bytes or not JSON."""
    raw = response.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"the answer exceeds {max_bytes} bytes")
    return parse_json(raw)
