"""A search that is counted: how many, how many failed, and how long somebody stood waiting for the retriever."""

from __future__ import annotations

from rollout_server.metrics import Stats
from rollout_server.search.base import Search, SearchResult


class MeasuredSearch:
    """Wraps any search; the result is passed on as it is."""

    def __init__(self, search: Search, stats: Stats) -> None:
        self._search, self._stats = search, stats

    async def __call__(self, query: str) -> SearchResult:
        with self._stats.waits.during("retriever"):
            result = await self._search(query)
        self._stats.counts["searches"] += 1
        self._stats.counts["search_errors"] += bool(result.error)
        return result
