"""Fetching the page behind a hit: guarded, capped in bytes and time, redirects by hand.

    address --> Guard.url --> resolve once --> Guard.addresses --> connect to that one --> html or plain text --> Page
       ^                                                                  |
       +----------------------- redirect, checked as the first -----------+

Failures: refused (by the guard), timeout, unreachable, http_NNN, content_type, redirects, garbage, not_recorded.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Literal

import aiohttp
from yarl import URL

from retriever.config_online import PageSettings
from retriever.online.guard import Guard, Lookup
from retriever.online.html_text import Page, decode, page_of_html, page_of_plain
from retriever.online.provider import Ask, Failed
from retriever.online.recordings import Recordings

_HEADERS = {"Accept": "text/html, text/plain;q=0.9", "User-Agent": "foray"}
_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


async def resolve(host: str, port: int) -> list[str]:
    """The system's resolver."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


class Pages:
    """Reads pages by their addresses, from recordings where there are some."""

    def __init__(
        self,
        settings: PageSettings,
        recordings: Recordings | None = None,
        record: Literal["off", "record", "replay", "auto"] = "off",
        lookup: Lookup = resolve,
    ) -> None:
        self._settings, self._guard, self._lookup = settings, Guard(settings), lookup
        self._recordings, self._record = recordings, record
        self._places = asyncio.Semaphore(settings.concurrency)

    async def read(self, url: str) -> Page:
        """The page's title and text. Failed where it cannot be had, or must not."""
        recordings, ask = self._recordings, Ask(url)
        if recordings is not None and self._record in ("replay", "auto"):
            try:
                return _recorded(await asyncio.to_thread(recordings.load, ask))
            except Failed as failure:
                if self._record == "replay" or failure.fault.cause != "not_recorded":
                    raise
        page = await self._fetched(url)
        if recordings is not None:
            await asyncio.to_thread(recordings.save, ask, page._asdict())
        return page

    async def _fetched(self, url: str) -> Page:
        limit = self._settings.timeout_s
        async with self._places:
            try:
                async with asyncio.timeout(limit):
                    content, kind, charset = await self._follow(url)
            except TimeoutError:
                raise Failed("timeout", f"no page within {limit} s") from None
            # parsing takes longer than the event loop should stand still
            return await asyncio.to_thread(self._text, content, kind, charset)

    def _text(self, content: bytes, kind: str, charset: str | None) -> Page:
        text = decode(content, charset)
        read = page_of_plain if kind == "text/plain" else page_of_html
        return read(text, self._settings.max_chars)

    async def _follow(self, text: str) -> tuple[bytes, str, str | None]:
        for _ in range(self._settings.max_redirects + 1):
            url = self._guard.url(text)
            answer = await self._hop(url)
            if not isinstance(answer, URL):
                return answer
            text = str(answer)
        raise Failed("redirects", f"more than {self._settings.max_redirects} redirects")

    async def _hop(self, url: URL) -> URL | tuple[bytes, str, str | None]:
        """One request: where it is redirected to, or the content, its type and its charset."""
        host = url.raw_host or ""
        try:
            address = self._guard.addresses(await self._lookup(host, url.port or 0))
            connector = self._guard.connector(host, address)
            session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=_HEADERS, trust_env=False
            )
            async with session, session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and (target := response.headers.get("Location")):
                    return _joined(url, target)
                if response.status != 200:
                    raise Failed(f"http_{response.status}")
                kind = response.content_type
                if kind not in _TYPES:
                    raise Failed("content_type", kind[:80])
                return await self._capped(response), kind, response.charset
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, socket.gaierror, UnicodeError) as error:
            raise Failed("unreachable", type(error).__name__) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise Failed("garbage", type(error).__name__) from None

    async def _capped(self, response: aiohttp.ClientResponse) -> bytes:
        """At most `max_mb` of the content after decompression, which aiohttp does piece by piece."""
        limit, content = int(self._settings.max_mb * 2**20), bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) >= limit:
                break
        return bytes(content[:limit])


def _joined(url: URL, target: str) -> URL:
    # the raw text is checked too: a parser may have mended what the guard would have refused
    if "\\" in target or not target.isprintable() or " " in target:
        raise Failed("refused", "a redirect to something that is no address")
    return url.join(URL(target))


def _recorded(reply: Any) -> Page:
    if not isinstance(reply, dict) or not all(isinstance(reply.get(name), str) for name in Page._fields):
        raise Failed("garbage", "a recording that is no page")
    return Page(reply["title"], reply["text"])
