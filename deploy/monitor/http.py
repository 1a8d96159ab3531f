"""HTTP requests of the `foray` command to a run's services: our token goes along, and no further than there."""

from __future__ import annotations

import os
import urllib.request
from email.message import Message
from http.client import HTTPResponse
from typing import IO, cast

from protocol.runtime.http.auth import Role, read_access


class _StayHere(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Refuse: our services do not redirect, and a process in their place must not send the token elsewhere."""


_opener = urllib.request.build_opener(_StayHere)


def ask(url: str, *roles: Role, body: bytes | None = None, timeout_s: float) -> HTTPResponse:
    """Return the answer of `url`, to be closed; POST of JSON with a `body`, else GET. Raises urllib's errors.

    roles  whose token goes along: of the first one that this process has a token of (`protocol.runtime.http.auth`)
    """
    headers = read_access(os.environ).headers(*roles) | ({"Content-Type": "application/json"} if body else {})
    return cast(HTTPResponse, _opener.open(urllib.request.Request(url, data=body, headers=headers), timeout=timeout_s))
