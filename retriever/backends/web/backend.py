"""A web search engine as a backend of the service.

    query --> recording? --> ProviderClient --> Provider.parse --> passages (cached by id, for `find`) --> QueryResult

A hit of rank r has the score 1 / r: providers return no comparable scores. Ids are hashes of addresses, so that model
text never becomes an address: `find` only returns documents from earlier answers of this process.
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
from retriever.backends.base import QueryFailure, QueryResult
from retriever.backends.index import document_json
from retriever.backends.web.client import ProviderClient, Secret, read_secret
from retriever.backends.web.config import WebBase
from retriever.backends.web.pages import PageFetcher
from retriever.backends.web.provider import Provider, ProviderHit, ProviderRequest, WebSearchError
from retriever.backends.web.providers import build_provider
from retriever.backends.web.recordings import Recordings

log = logging.getLogger(__name__)
MAX_HIT_CHARS = 20_000
"""Maximum characters of one hit: snippets have a few hundred, but providers do not guarantee that."""


class WebBackend:
    """Created by `open_web`. See `Backend`."""

    def __init__(
        self, settings: WebBase, provider: Provider, client: ProviderClient | None, recordings: Recordings | None
    ) -> None:
        self._settings, self._provider, self._client, self._recordings = settings, provider, client, recordings
        self._known = HitCache(settings.remembered)
        self._pages = PageFetcher(settings.pages, recordings, settings.record) if settings.fetch_pages else None
        self._counts: Counter[str] = Counter()
        identity = json.dumps(web_identity(settings), sort_keys=True)
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """See `Backend`. Covers the provider and the settings that determine an answer, not the web itself."""
        return self._fingerprint

    async def search(self, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
        """See `Backend`. Runs all queries concurrently, within rate and concurrency limits."""
        return await asyncio.gather(*(self._search(query, k) for query in queries))

    async def find(self, passage_id: str) -> Passage | None:
        """See `Backend`. Raises WebSearchError if the hit is known but its page is unavailable."""
        hit = self._known.get(passage_id)
        if hit is None or self._pages is None or not hit.url:
            return None if hit is None else hit.passage
        return await self._page(hit, self._pages)

    def counters(self) -> dict[str, float]:
        """Return totals since the start, for metrics; they never decrease.

        requests (sent, each attempt), cost (of the requests, in the unit of `cost_per_request`), retries, answered,
        failed, replayed, recorded (replies), unrecorded (replies and pages that could not be written), pages,
        pages_failed.
        """
        names = ("answered", "failed", "replayed", "recorded", "pages", "pages_failed")
        counts = {name: float(self._counts[name]) for name in names}
        counts["unrecorded"] = 0.0 if self._recordings is None else float(self._recordings.unwritten)
        client = self._client
        if client is None:
            return {"requests": 0.0, "cost": 0.0, "retries": 0.0} | counts
        sent = {"requests": float(client.budget.requests), "cost": client.budget.cost}
        return sent | {"retries": float(client.retries)} | counts

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        client = self._client
        return {
            "type": "online",
            "fingerprint": self._fingerprint,
            "provider": self._settings.type,
            "settings": web_identity(self._settings),
            "record": self._settings.record,
            "counters": self.counters(),
            "statuses": {} if client is None else dict(sorted(client.statuses.items())),
            "causes": {name.partition(" ")[2]: n for name, n in sorted(self._counts.items()) if " " in name},
            "requests_left": None if client is None else client.budget.left,
        }

    async def close(self) -> None:
        """See `Backend`."""
        if self._client is not None:
            await self._client.close()

    async def _search(self, query: str, k: int) -> QueryResult | QueryFailure:
        try:
            reply = await self._reply(self._provider.request(query, k))
            hits = hits_of(self._provider.parse(reply))[:k]
            passages = [hit.passage for hit in hits]
            if self._pages is not None and self._settings.pages.in_results:
                passages = await asyncio.gather(*(self._page_or_snippet(hit, self._pages) for hit in hits))
        except WebSearchError as error:
            return self._failed(error.failure)
        except Exception as error:
            log.error("%s: a search failed: %s", self._settings.type, self._redact(traceback.format_exc()))
            return self._failed(QueryFailure("internal", type(error).__name__))
        for hit in hits:
            self._known.put(hit)
        self._counts["answered"] += 1
        documents = tuple(document_json(passage) for passage in passages)
        return QueryResult(documents, tuple(1 / rank for rank in range(1, len(hits) + 1)))

    def _failed(self, failure: QueryFailure) -> QueryFailure:
        self._counts["failed"] += 1
        self._counts[f"search {failure.cause}"] += 1
        return failure

    async def _reply(self, request: ProviderRequest) -> dict[str, Any]:
        if self._recordings is not None and self._settings.record in ("replay", "auto"):
            try:
                reply = await asyncio.to_thread(self._recordings.load, request)
            except WebSearchError as error:
                if self._client is None or error.failure.cause != "not_recorded":
                    raise
            else:
                if not isinstance(reply, dict):
                    raise WebSearchError("garbage", "the recording does not contain an object")
                self._counts["replayed"] += 1
                return reply
        assert self._client is not None
        reply = await self._client.send(request)
        if self._recordings is not None:
            # do not record an answer that cannot be parsed
            self._provider.parse(reply)
            self._counts["recorded"] += await asyncio.to_thread(self._recordings.save, request, reply)
        return reply

    async def _page(self, hit: WebHit, pages: PageFetcher) -> Passage:
        try:
            page = await pages.read(hit.url)
        except WebSearchError as error:
            self._counts["pages_failed"] += 1
            self._counts[f"page {error.failure.cause}"] += 1
            raise
        self._counts["pages"] += 1
        return hit.with_text(page.title, page.text)

    async def _page_or_snippet(self, hit: WebHit, pages: PageFetcher) -> Passage:
        """Return the page's text, or the provider's snippet if the page is unavailable."""
        if not hit.url or hit.box:
            return hit.passage
        try:
            return await self._page(hit, pages)
        except WebSearchError:
            return hit.passage

    def _redact(self, text: str) -> str:
        return text if self._client is None else self._client.redact(text)


def open_web(settings: WebBase) -> WebBackend:
    """Return the backend of an engine. Raises UserError if a required key or directory is missing."""
    provider, recordings = build_provider(settings), None
    if settings.record != "off":
        assert settings.recordings is not None  # validated by the settings
        recordings = Recordings(settings.recordings, settings.type, writing=settings.record != "replay")
    client = None
    if settings.record != "replay":
        key = read_secret(settings.key_env) if settings.key_env or settings.NEEDS_KEY else None
        client = ProviderClient(settings, provider, key, _proxy(settings))
    return WebBackend(settings, provider, client, recordings)


def web_identity(settings: WebBase) -> dict[str, Any]:
    """Return what determines an answer, as JSON-compatible values: provider, address, region, language, pages."""
    identity = settings.model_dump(mode="json", exclude=set(settings.OPERATION))
    if not settings.fetch_pages:
        del identity["pages"]
    return identity


class WebHit(NamedTuple):
    """One document of an answer."""

    passage: Passage
    url: str
    box: bool

    def with_text(self, title: str, text: str) -> Passage:
        """Return the document under the same id with another text, keeping its title if the new one is empty."""
        return _passage(self.passage.id, title or self.passage.title, text, self.url)


class HitCache:
    """LRU map from ids to hits."""

    def __init__(self, limit: int) -> None:
        self._limit, self._hits = limit, OrderedDict[str, WebHit]()

    def put(self, hit: WebHit) -> None:
        """Store a hit, replacing an older one with the same id."""
        self._hits[hit.passage.id] = hit
        self._hits.move_to_end(hit.passage.id)
        while len(self._hits) > self._limit:
            self._hits.popitem(last=False)

    def get(self, passage_id: str) -> WebHit | None:
        """Return the hit, which becomes the most recently used, or None."""
        hit = self._hits.get(passage_id)
        if hit is not None:
            self._hits.move_to_end(passage_id)
        return hit


def hits_of(found: Iterable[ProviderHit]) -> list[WebHit]:
    """Return one hit per page, in order, without empty hits and duplicate ids.

    Ids: `url:` and a hash of the address; `box:` and a hash of the content of an answer box, which may have a page's
    address but is not that page, and often has none.
    """
    hits: dict[str, WebHit] = {}
    for item in found:
        title, text, url = _sanitise(item.title)[:500], _sanitise(item.text)[:MAX_HIT_CHARS], _sanitise(item.url)
        if not (title or text):
            continue
        by_url = url and not item.box
        seed = url if by_url else "\n".join((title, text, url))
        name = f"{'url' if by_url else 'box'}:{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        hits.setdefault(name, WebHit(_passage(name, title, text, url), url, item.box))
    return list(hits.values())


def _passage(name: str, title: str, text: str, url: str) -> Passage:
    # the first line is the title, in quotes that are not part of it
    line = " ".join(title.replace('"', "'").split())
    return Passage(id=name, contents=f'"{line}"\n{text}', **({"url": url} if url else {}))


def _sanitise(text: str) -> str:
    # a lone surrogate is legal in JSON but cannot be encoded as UTF-8
    return text.encode("utf-8", "replace").decode().replace("\x00", "").strip()


def _proxy(settings: WebBase) -> Secret | None:
    return read_secret(settings.proxy_env, "a proxy's URL") if settings.proxy_env else None
