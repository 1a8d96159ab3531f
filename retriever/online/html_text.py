"""The text of a page: title and body without scripts, styles and navigation. Standard library only."""

from __future__ import annotations

import codecs
import html
import re
import time
from html.parser import HTMLParser
from typing import NamedTuple

from retriever.online.provider import Failed

_SKIPPED = frozenset(
    {"script", "style", "noscript", "template", "svg", "nav", "header", "footer", "aside", "form", "iframe", "select"}
)
_CONTENT = frozenset({"main", "article"})
"""Where what was skipped ends at the latest: a `nav` that is never closed must not hide the page."""
_BREAKING = _CONTENT | frozenset(
    {"body", "p", "div", "br", "hr", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "section", "blockquote", "pre"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "figcaption"}
)
_DEEPEST = 64
"""Skipped elements inside each other that are told apart."""
_CHUNK, _UNFINISHED, _LEFTOVER, _LONGEST_S = 1 << 16, 1 << 17, 1 << 12, 2.0
"""Characters fed at once; of a tag or comment that does not end, before the rest is given up; of an unfinished rest
that is still looked at; seconds for one page. Python's parser takes quadratic time for some unfinished constructs
(CVE-2025-6069), and pages are written by strangers."""
_META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SECTION = re.compile(r"<!\[(?!CDATA\[)[^>]{0,200}>", re.IGNORECASE)
"""`<![if ..]>` and the like: some of them the parser does not survive."""


class Page(NamedTuple):
    """What is left of a page."""

    title: str
    text: str


def page_of_html(content: str, max_chars: int) -> Page:
    """Title and text, one block a line, blanks collapsed, the text cut after `max_chars` characters.

    Failed("garbage") where there is no reading it.
    """
    reader, end = _Reader(), time.monotonic() + _LONGEST_S
    content = _SECTION.sub("", content)
    try:
        for start in range(0, len(content), _CHUNK):
            reader.feed(content[start : start + _CHUNK])
            # a script may be long: its text is waited for, and costs nothing
            if time.monotonic() > end or (len(reader.rawdata) > _UNFINISHED and not reader.cdata_elem):
                break
        if "<" not in reader.rawdata:
            reader.handle_data(html.unescape(reader.rawdata))
        elif len(reader.rawdata) <= _LEFTOVER:
            reader.close()
    except (AssertionError, ValueError):  # a character reference of thousands of digits is a ValueError
        raise Failed("garbage", "HTML that cannot be parsed") from None
    return Page(" ".join("".join(reader.title).split())[:500], _tidy("".join(reader.parts), max_chars))


def page_of_plain(content: str, max_chars: int) -> Page:
    """A page that is text already."""
    return Page("", _tidy(content, max_chars))


def decode(content: bytes, charset: str | None) -> str:
    """Bytes as text: by byte order mark, header (`charset`), `meta`, else UTF-8; what does not fit becomes U+FFFD."""
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if content.startswith(mark):
            return content.decode(name, "replace")
    meta = _META.search(content[:2048])
    for given in (charset, meta.group(1).decode() if meta else None):
        if given is not None and _is_text_encoding(given):
            return content.decode(given, "replace")
    return content.decode("utf-8", "replace")


def _is_text_encoding(name: str) -> bool:
    try:
        "".encode(name)  # refuses unknown names, and codecs that are no text encoding (zlib, base64)
        # the codec's own name: blanks and hyphens in the given one mean nothing
        known = codecs.lookup(name).name
    except (LookupError, UnicodeError, ValueError):
        return False
    return known.replace("_", "-") not in ("idna", "punycode", "unicode-escape", "raw-unicode-escape")


class _Reader(HTMLParser):
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
