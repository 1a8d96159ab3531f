"""Fetch the page of a hit: guarded, limited in bytes and time, with every redirect checked.

    address --> SsrfGuard.url --> resolve once --> SsrfGuard.addresses --> connect to that one --> text --> WebPage
       ^                                                                  |
       +----------------------- redirect, checked as the first -----------+

Failures: refused (by the guard), timeout, unreachable, http_NNN, content_type, redirects, garbage, not_recorded.

Text is extracted by the standard library's parser, in chunks, with a time limit, because pages are untrusted.
Other libraries failed the same tests: selectolax 1.0.2 takes more than a minute for 400 kB of nested elements, in C,
where it cannot be interrupted; trafilatura 2.3 finds no text in short pages.
"""

from __future__ import annotations

import asyncio
import codecs
import html
import re
import socket
import time
from html.parser import HTMLParser
from typing import Any, Literal, NamedTuple

import aiohttp
from yarl import URL

from protocol.runtime.timing import loop_timeout
from retriever.backends.web.config import PageSettings
from retriever.backends.web.provider import ProviderRequest, WebSearchError
from retriever.backends.web.recordings import Recordings
from retriever.backends.web.ssrf import Lookup, SsrfGuard

MAX_REDIRECTS = 3
"""Maximum redirects of one page; each is checked like the first address."""
MAX_BYTES = 1 << 20
"""Maximum size of one page after decompression; the rest is dropped."""
MAX_CHARS = 20_000
"""Maximum text of one page; the rest is dropped: more than any episode reads."""
CONCURRENCY = 8
"""Maximum concurrent page fetches."""
_HEADERS = {"Accept": "text/html, text/plain;q=0.9", "User-Agent": "foray"}
_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SKIPPED = frozenset(
    {"script", "style", "noscript", "template", "svg", "nav", "header", "footer", "aside", "form", "iframe", "select"}
)
_CONTENT = frozenset({"main", "article"})
"""Elements that end a skipped section: an unclosed `nav` must not hide the page."""
_BREAKING = _CONTENT | frozenset(
    {"body", "p", "div", "br", "hr", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "section", "blockquote", "pre"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "figcaption"}
)
_DEEPEST = 64
"""Maximum nesting of skipped elements that is tracked."""
_CHUNK, _UNFINISHED, _LEFTOVER, _LONGEST_S = 1 << 16, 1 << 17, 1 << 12, 2.0
"""Limits of the parser: characters fed at once; of a tag or comment without an end, after which the rest is dropped; of
an unfinished rest that is still parsed; seconds per page. Python's parser takes quadratic time for some unfinished
constructs (CVE-2025-6069), and pages are untrusted."""
_META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SECTION = re.compile(r"<!\[(?!CDATA\[)[^>]{0,200}>", re.IGNORECASE)
"""`<![if ..]>` and the like: some of them crash the parser."""


class WebPage(NamedTuple):
    """Title and text of a page."""

    title: str
    text: str


async def resolve(host: str, port: int) -> list[str]:
    """Resolve with the system's resolver."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


class PageFetcher:
    """Reads pages by address, or from recordings."""

    def __init__(
        self,
        settings: PageSettings,
        recordings: Recordings | None = None,
        record: Literal["off", "record", "replay", "auto"] = "off",
        lookup: Lookup = resolve,
    ) -> None:
        self._settings, self._guard, self._lookup = settings, SsrfGuard(settings), lookup
        self._recordings, self._record = recordings, record
        self._semaphore = asyncio.Semaphore(CONCURRENCY)

    async def read(self, url: str) -> WebPage:
        """Return the page's title and text. Raises WebSearchError if it is unavailable or refused."""
        recordings, request = self._recordings, ProviderRequest(url)
        if recordings is not None and self._record in ("replay", "auto"):
            try:
                return _recorded(await asyncio.to_thread(recordings.load, request))
            except WebSearchError as error:
                if self._record == "replay" or error.failure.cause != "not_recorded":
                    raise
        page = await self._fetched(url)
        if recordings is not None:
            await asyncio.to_thread(recordings.save, request, page._asdict())
        return page

    async def _fetched(self, url: str) -> WebPage:
        limit = self._settings.timeout_s
        async with self._semaphore:
            try:
                async with loop_timeout(limit):
                    content, kind, charset = await self._follow(url)
            except TimeoutError:
                raise WebSearchError("timeout", f"no page within {limit} s") from None
            # parsing is too slow for the event loop
            return await asyncio.to_thread(self._text, content, kind, charset)

    def _text(self, content: bytes, kind: str, charset: str | None) -> WebPage:
        text = decode(content, charset)
        read = page_of_plain if kind == "text/plain" else page_of_html
        return read(text, MAX_CHARS)

    async def _follow(self, text: str) -> tuple[bytes, str, str | None]:
        for _ in range(MAX_REDIRECTS + 1):
            url = self._guard.url(text)
            answer = await self._hop(url)
            if not isinstance(answer, URL):
                return answer
            text = str(answer)
        raise WebSearchError("redirects", f"more than {MAX_REDIRECTS} redirects")

    async def _hop(self, url: URL) -> URL | tuple[bytes, str, str | None]:
        """Make one request; return the redirect target, or the content, its type and its charset."""
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
                    raise WebSearchError(f"http_{response.status}")
                kind = response.content_type
                if kind not in _TYPES:
                    raise WebSearchError("content_type", kind[:80])
                return await self._capped(response), kind, response.charset
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, socket.gaierror, UnicodeError) as error:
            raise WebSearchError("unreachable", type(error).__name__) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise WebSearchError("garbage", type(error).__name__) from None

    async def _capped(self, response: aiohttp.ClientResponse) -> bytes:
        """Return at most `max_mb` of the content after decompression, which aiohttp does in chunks."""
        limit, content = MAX_BYTES, bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) >= limit:
                break
        return bytes(content[:limit])


def page_of_html(content: str, max_chars: int) -> WebPage:
    """Return the title and text, one block per line, blanks collapsed, the text cut after `max_chars` characters.

    WebSearchError("garbage") if it cannot be parsed.
    """
    reader, end = _TextExtractor(), time.monotonic() + _LONGEST_S
    content = _SECTION.sub("", content)
    try:
        for start in range(0, len(content), _CHUNK):
            reader.feed(content[start : start + _CHUNK])
            # a script may be long; its text is skipped cheaply
            if time.monotonic() > end or (len(reader.rawdata) > _UNFINISHED and not reader.cdata_elem):
                break
        if "<" not in reader.rawdata:
            reader.handle_data(html.unescape(reader.rawdata))
        elif len(reader.rawdata) <= _LEFTOVER:
            reader.close()
    except (AssertionError, ValueError):  # a character reference of thousands of digits is a ValueError
        raise WebSearchError("garbage", "HTML that cannot be parsed") from None
    return WebPage(" ".join("".join(reader.title).split())[:500], _tidy("".join(reader.parts), max_chars))


def page_of_plain(content: str, max_chars: int) -> WebPage:
    """Return a page that is text already."""
    return WebPage("", _tidy(content, max_chars))


def decode(content: bytes, charset: str | None) -> str:
    """Decode by byte order mark, header (`charset`), `meta`, or UTF-8; undecodable bytes become U+FFFD."""
    for mark, name in _MARKS:
        if content.startswith(mark):
            return content.decode(name, "replace")
    meta = _META.search(content[:2048])
    for given in (charset, meta.group(1).decode() if meta else None):
        if given is not None and _is_text_encoding(given):
            return content.decode(given, "replace")
    return content.decode("utf-8", "replace")


def _is_text_encoding(name: str) -> bool:
    try:
        "".encode(name)  # refuses unknown names and codecs that are not text encodings (zlib, base64)
        # the codec's canonical name: blanks and hyphens are ignored
        known = codecs.lookup(name).name
    except (LookupError, UnicodeError, ValueError):
        return False
    return known.replace("_", "-") not in ("idna", "punycode", "unicode-escape", "raw-unicode-escape")


class _TextExtractor(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.parts: list[str] = []
        self._open: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _CONTENT:
            self._open.clear()
        if tag in _SKIPPED:
            if len(self._open) < _DEEPEST:
                self._open.append(tag)
        elif tag == "title" and not self.title and not self._open:
            self._in_title = True
        elif tag in _BREAKING:
            self._in_title = False
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BREAKING:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            del self._open[self._open.index(tag) :]
        elif tag == "title":
            self._in_title = False
        elif tag in _BREAKING:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._open:
            self.parts.append(data)


def _tidy(text: str, max_chars: int) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)[:max_chars].rstrip()


def _joined(url: URL, target: str) -> URL:
    # check the raw text too: a parser may repair what the guard would refuse
    if "\\" in target or not target.isprintable() or " " in target:
        raise WebSearchError("refused", "a redirect to an invalid address")
    return url.join(URL(target))


def _recorded(reply: Any) -> WebPage:
    if not isinstance(reply, dict) or not all(isinstance(reply.get(name), str) for name in WebPage._fields):
        raise WebSearchError("garbage", "the recording is not a page")
    return WebPage(reply["title"], reply["text"])
