"""A search that is counted: how many, how they ended, how long they took, and how long somebody stood waiting."""

from __future__ import annotations

from rollout_server.metrics import Stats
from rollout_server.search.base import SearchResult, SearchService
from rollout_server.search.fault import KNOWN, Names


class MeasuredSearch:
    """Wraps any search; the result is passed on as it is. Whoever built the search closes it.

    Counts `searches`, of which `search_outcome_found`, `search_outcome_nothing` (answered, and no passage: not a
    failure, and never the picture of one) and `search_errors`, of which `search_errors_CAUSE`.
    """

    def __init__(self, search: SearchService, stats: Stats) -> None:
        self._search, self._stats = search, stats
        self._names = Names()
        for name in ("searches", "search_errors", "search_outcome_found", "search_outcome_nothing"):
            stats.counts[name] += 0
        for cause in KNOWN:
            stats.counts[f"search_errors_{cause}"] += 0
        search.report(stats.counts, stats.gauges)
        stats.text["search_outage"] = lambda: self.outage

    @property
    def outage(self) -> str:
        """Why no query can be answered now, "" when one can."""
        return self._search.outage

    @property
    def held_up(self) -> bool:
        """Whether a trajectory that begins now would only wait for a retriever."""
        return bool(self._search.outage) or self._search.congested

    async def __call__(self, query: str) -> SearchResult:
        with self._stats.waits.during("retriever"):
            result = await self._search(query)
        counts = self._stats.counts
        counts["searches"] += 1
        self._stats.time("search_seconds", result.latency_s)
        if result.error:
            counts["search_errors"] += 1
            counts[f"search_errors_{self._names(result.error)}"] += 1
        else:
            counts["search_outcome_found" if result.passages else "search_outcome_nothing"] += 1
        return result
