"""What a provider found as passages with ids, and the memory of them that `find` looks into."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from protocol.search import Passage
from retriever.online.provider import Found

LONGEST_TEXT = 20_000
"""Characters of one hit that are kept: a snippet has some hundred, and nobody promises that."""


class Hit(NamedTuple):
    """One document of an answer."""

    passage: Passage
    url: str
    box: bool

    def with_text(self, title: str, text: str) -> Passage:
        """The document under the same id with another text, and with its own title where there is no other."""
        return _passage(self.passage.id, title or self.passage.title, text, self.url)


class KnownHits:
    """Hits by id, least recently used first out."""

    def __init__(self, limit: int) -> None:
        self._limit, self._hits = limit, OrderedDict[str, Hit]()

    def put(self, hit: Hit) -> None:
        """Keep a hit, in place of an older one of its id."""
        self._hits[hit.passage.id] = hit
        self._hits.move_to_end(hit.passage.id)
        while len(self._hits) > self._limit:
            self._hits.popitem(last=False)

    def get(self, passage_id: str) -> Hit | None:
        """The hit, which becomes the most recently used, or None."""
        hit = self._hits.get(passage_id)
        if hit is not None:
            self._hits.move_to_end(passage_id)
        return hit


def hits_of(found: Iterable[Found]) -> list[Hit]:
    """One hit a page, in order: empty ones left out, and the later of two with one id.

    Ids: `url:` and a hash of the address; `box:` and a hash of all of an answer box, which may have a page's address
    but is not that page, and often has none.
    """
    hits: dict[str, Hit] = {}
    for item in found:
        title, text, url = _clean(item.title)[:500], _clean(item.text)[:LONGEST_TEXT], _clean(item.url)
        if not (title or text):
            continue
        by_url = url and not item.box
        seed = url if by_url else "\n".join((title, text, url))
        name = f"{'url' if by_url else 'box'}:{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        hits.setdefault(name, Hit(_passage(name, title, text, url), url, item.box))
    return list(hits.values())


def _passage(name: str, title: str, text: str, url: str) -> Passage:
    # the first line is the title, and its quotes are not part of it
    line = " ".join(title.replace('"', "'").split())
    return Passage(id=name, contents=f'"{line}"\n{text}', **({"url": url} if url else {}))


def _clean(text: str) -> str:
    # half a surrogate pair is legal in JSON and cannot be sent on
    return text.encode("utf-8", "replace").decode().replace("\x00", "").strip()
