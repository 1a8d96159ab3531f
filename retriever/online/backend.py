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
from collections import Counter
from collections.abc import Sequence
from typing import Any

from protocol.search import Passage
from retriever.backend import Fault
from retriever.cache import Answer
from retriever.config_online import OnlineBase
from retriever.online.hits import Hit, KnownHits, hits_of
from retriever.online.pages import Pages
from retriever.online.provider import Ask, Failed, Provider
from retriever.online.recordings import Recordings
from retriever.online.secret import Secret, read_secret
from retriever.online.sender import Sender
from retriever.searcher import document_json

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
