"""Read HTTP answers within a bound on memory, whatever the server declares, chunks or compresses."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from protocol.errors import ForayError

if TYPE_CHECKING:
    import aiohttp

UNCOMPRESSED = MappingProxyType({"Accept-Encoding": "identity"})
"""Headers of every request: a compressed answer of 2 MB may hold 2 GB."""


class AnswerTooLarge(ForayError):
    """The answer exceeds its limit, or is compressed although Foray asks for plain bytes."""


def bounded_session(**options: Any) -> aiohttp.ClientSession:
    """Return a session that never decompresses an answer. `options`: of `aiohttp.ClientSession`.

    Read its answers with `read_bounded` or `response.content` only: `response.read()` has no bound.
    """
    import aiohttp

    headers = {**UNCOMPRESSED, **options.pop("headers", {})}
    return aiohttp.ClientSession(headers=headers, auto_decompress=False, **options)


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
