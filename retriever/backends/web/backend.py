"""An online search engine as a backend of the service.

    query --> recording? --> Sender --> Provider.read --> passages (kept by id, for `find`) --> Answer

A hit of rank r has the score 1 / r: providers give none that could be compared. Ids are hashes of addresses, so that
no text of a model ever becomes an address: `find` knows only what an earlier answer of this process brought.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from protocol.search import Passage
from retriever.backends.base import Fault
from retriever.backends.index import document_json
from retriever.backends.web.client import Secret, Sender, read_secret
from retriever.backends.web.config import OnlineBase
from retriever.backends.web.pages import Pages
from retriever.backends.web.provider import Ask, Failed, Found, Provider
from retriever.backends.web.recordings import Recordings
from retriever.serving.cache import Answer

# What a provider found as passages with ids, and the memory of them that `find` looks into.

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


log = logging.getLogger(__name__)


class OnlineBackend:
    """Made by `open_online`. As `backend.Backend`."""

    def __init__(
        self, settings: OnlineBase, provider: Provider, sender: Sender | None, recordings: Recordings | None
    ) -> None:
        self._settings, self._provider, self._sender, self._recordings = settings, provider, sender, recordings
        self._known = KnownHits(settings.remembered)
        self._pages = Pages(settings.pages, recordings, settings.record) if settings.fetch_pages else None
        self._counts: Counter[str] = Counter()
        identity = json.dumps(settings.identity(), sort_keys=True)
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """See `Backend`. Of the provider and the settings that decide an answer, not of the web behind it."""
        return self._fingerprint

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[Answer | Fault]:
        """See `Backend`. All queries at once, as far as rate and concurrency let them."""
        return await asyncio.gather(*(self._search(query, k) for query in queries))

    async def find(self, passage_id: str) -> Passage | None:
        """See `Backend`. Raises Failed where the hit is known, but its page cannot be had."""
        hit = self._known.get(passage_id)
        if hit is None or self._pages is None or not hit.url:
            return None if hit is None else hit.passage
        return await self._page(hit, self._pages)

    def counters(self) -> dict[str, float]:
        """Totals since the start, for metrics: none ever falls.

        requests (sent, each attempt), cost (of them, in the unit of `cost_per_request`), retries, answered, failed,
        replayed, recorded (replies), unrecorded (replies and pages that the disk did not take), pages, pages_failed.
        """
        names = ("answered", "failed", "replayed", "recorded", "pages", "pages_failed")
        counts = {name: float(self._counts[name]) for name in names}
        counts["unrecorded"] = 0.0 if self._recordings is None else float(self._recordings.unwritten)
        sender = self._sender
        if sender is None:
            return {"requests": 0.0, "cost": 0.0, "retries": 0.0} | counts
        sent = {"requests": float(sender.budget.requests), "cost": sender.budget.cost}
        return sent | {"retries": float(sender.retries)} | counts

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        sender = self._sender
        return {
            "type": "online",
            "fingerprint": self._fingerprint,
            "provider": self._settings.type,
            "settings": self._settings.identity(),
            "record": self._settings.record,
            "counters": self.counters(),
            "statuses": {} if sender is None else dict(sorted(sender.statuses.items())),
            "causes": {name.partition(" ")[2]: n for name, n in sorted(self._counts.items()) if " " in name},
            "requests_left": None if sender is None else sender.budget.left,
        }

    async def close(self) -> None:
        """See `Backend`."""
        if self._sender is not None:
            await self._sender.close()

    async def _search(self, query: str, k: int) -> Answer | Fault:
        try:
            reply = await self._reply(self._provider.ask(query, k))
            hits = hits_of(self._provider.read(reply))[:k]
            passages = [hit.passage for hit in hits]
            if self._pages is not None and self._settings.pages.in_results:
                passages = await asyncio.gather(*(self._page_or_snippet(hit, self._pages) for hit in hits))
        except Failed as failure:
            return self._failed(failure.fault)
        except Exception as error:
            log.error("%s: a search failed: %s", self._settings.type, self._clear(traceback.format_exc()))
            return self._failed(Fault("internal", type(error).__name__))
        for hit in hits:
            self._known.put(hit)
        self._counts["answered"] += 1
        documents = tuple(document_json(passage) for passage in passages)
        return Answer(documents, tuple(1 / rank for rank in range(1, len(hits) + 1)))

    def _failed(self, fault: Fault) -> Fault:
        self._counts["failed"] += 1
        self._counts[f"search {fault.cause}"] += 1
        return fault

    async def _reply(self, ask: Ask) -> dict[str, Any]:
        if self._recordings is not None and self._settings.record in ("replay", "auto"):
            try:
                reply = await asyncio.to_thread(self._recordings.load, ask)
            except Failed as failure:
                if self._sender is None or failure.fault.cause != "not_recorded":
                    raise
            else:
                if not isinstance(reply, dict):
                    raise Failed("garbage", "a recording without an object")
                self._counts["replayed"] += 1
                return reply
        assert self._sender is not None
        reply = await self._sender.send(ask)
        if self._recordings is not None:
            # an answer that would not be understood again is not worth keeping
            self._provider.read(reply)
            self._counts["recorded"] += await asyncio.to_thread(self._recordings.save, ask, reply)
        return reply

    async def _page(self, hit: Hit, pages: Pages) -> Passage:
        try:
            page = await pages.read(hit.url)
        except Failed as failure:
            self._counts["pages_failed"] += 1
            self._counts[f"page {failure.fault.cause}"] += 1
            raise
        self._counts["pages"] += 1
        return hit.with_text(page.title, page.text)

    async def _page_or_snippet(self, hit: Hit, pages: Pages) -> Passage:
        """The page's text; where it cannot be had, or there is no page, what the provider gave."""
        if not hit.url or hit.box:
            return hit.passage
        try:
            return await self._page(hit, pages)
        except Failed:
            return hit.passage

    def _clear(self, text: str) -> str:
        return text if self._sender is None else self._sender.clear(text)


def open_online(settings: OnlineBase, provider: Provider) -> OnlineBackend:
    """The backend of a provider. UserError without a key or a directory that it needs."""
    recordings = None
    if settings.record != "off":
        assert settings.recordings is not None  # the settings have seen to it
        recordings = Recordings(settings.recordings, settings.type, writing=settings.record != "replay")
    sender = None
    if settings.record != "replay":
        key = read_secret(settings.key_env) if settings.key_env or settings.NEEDS_KEY else None
        sender = Sender(settings, provider, key, _proxy(settings))
    return OnlineBackend(settings, provider, sender, recordings)


def _proxy(settings: OnlineBase) -> Secret | None:
    return read_secret(settings.proxy_env, "a proxy's URL") if settings.proxy_env else None
