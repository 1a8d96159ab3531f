"""Read HTTP answers within a bound on memory, whatever the server declares, chunks or compresses, and parse them."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from protocol.errors import ForayError

if TYPE_CHECKING:
    import aiohttp

UNCOMPRESSED = MappingProxyType({"Accept-Encoding": "identity"})
"""Headers of every request: a compressed answer of 2 MB may hold 2 GB."""
CONNECT_S = 5.0
"""Time to connect: a host that drops packets must not use up the time of a request."""
KEEP_ALIVE_S = 4.0
"""Idle connections are closed by the client after this time. SGLang's server and uvicorn close them after 5 s, and a
request sent at that moment would look like a dead server."""


class AnswerTooLarge(ForayError):
    """The answer exceeds its limit, or is compressed although Foray asks for plain bytes."""


def bounded_session(*, connect_s: float = CONNECT_S, limit: int = 0, **options: Any) -> aiohttp.ClientSession:
    """Return a session that never decompresses an answer, and limits nothing but the time to connect.

    Read its answers with `read_bounded` or `response.content` only: `response.read()` has no bound.

    limit    maximum number of connections, 0: no limit
    options  of `aiohttp.ClientSession`
    """
    import aiohttp

    from protocol.runtime.http.connector import LoopConnector

    headers = {**UNCOMPRESSED, **options.pop("headers", {})}
    options = {"timeout": aiohttp.ClientTimeout(total=None), **options}
    connector = LoopConnector(connect_s, limit=limit, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False, **options)


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body. Raises AnswerTooLarge before more than max_bytes and one chunk are held."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise AnswerTooLarge(f"the answer is compressed ({encoding[:20]}) although plain bytes were requested")
    too_large = AnswerTooLarge(f"the answer exceeds {max_bytes} bytes")
    if (response.content_length or 0) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        parts.append(chunk)
    return b"".join(parts)


async def read_start(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """Return the first bytes of an answer as text, for an error message."""
    return (await response.content.read(max_bytes)).decode(errors="replace")


def error_text(raw: bytes, otherwise: str) -> str:
    """Return the text of an error answer `{"error": ..}`, in OpenAI's form or a plain text; `otherwise` of another."""
    try:
        return message_of(parse_json(raw)["error"])
    except (ValueError, LookupError, TypeError):
        return otherwise


def message_of(error: Any) -> str:
    """Return the text of an `error`, in OpenAI's form or a plain text, up to 500 characters."""
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON answer, with U+FFFD for each lone surrogate. Raises ValueError.

    Python's json.dumps writes half a surrogate pair as it is, if a text contains one; UTF-8 cannot encode it.
    """
    from pydantic_core import from_json

    try:
        return from_json(raw)
    except ValueError:
        pass
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return from_json(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
