"""Server-sent events: headers, format, and writing to a client that may not read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from aiohttp import web

from protocol.runtime.timing import loop_timeout

HEADERS: Mapping[str, str] = MappingProxyType(
    {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
)
KEEPALIVE = ": alive\n\n"
"""A comment, which clients ignore: it shows both sides that the connection is open."""


def event(kind: str, data: str, event_id: str = "") -> str:
    """Return one event. `data`: one line, such as JSON."""
    identified = f"id: {event_id}\n" if event_id else ""
    return f"{identified}event: {kind}\ndata: {data}\n\n"


async def write(request: web.Request, response: web.StreamResponse, data: bytes, timeout_s: float) -> None:
    """Write to the client. Raises ConnectionResetError, and drops what is buffered, on a timeout."""
    try:
        async with loop_timeout(timeout_s):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has read nothing for {timeout_s:g} s") from None


async def end(response: web.StreamResponse) -> None:
    """End the stream. A client that has gone has had the last event: many close the connection when they read it."""
    with suppress(ConnectionResetError):
        await response.write_eof()
