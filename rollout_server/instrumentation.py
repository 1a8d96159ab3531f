"""Wrappers that count searches and tool calls: number, outcome, duration."""

from __future__ import annotations

from dataclasses import replace

from protocol.runtime.tracing import span
from rollout_server.environment.environment import Environment
from rollout_server.metrics import Stats
from rollout_server.search.base import KNOWN, CauseLabels, SearchResult, SearchService
from rollout_server.tools.base import Tool, ToolResult

CAUSE_CHARS = 100
"""Maximum length of a tool's cause in the name of a metric, which has at most 256 characters."""


class InstrumentedSearch:
    """Counts the searches of a search service, their outcomes and durations. Does not own the service.

    Counts `searches`, split into `search_outcome_found`, `search_outcome_nothing` (no passage found, which is not a
    failure) and `search_errors`; the latter split into `search_errors_CAUSE`.
    """

    def __init__(self, search: SearchService, stats: Stats) -> None:
        self._search, self._stats = search, stats
        self._labels = CauseLabels()
        for name in ("searches", "search_errors", "search_outcome_found", "search_outcome_nothing"):
            stats.counts[name] += 0
        for cause in KNOWN:
            stats.counts[f"search_errors_{cause}"] += 0
        search.report(stats.counts, stats.gauges)
        stats.text["search_outage"] = lambda: self.outage

    @property
    def outage(self) -> str:
        """Why no query can be answered now; "" if queries can be answered."""
        return self._search.outage

    @property
    def backpressure(self) -> bool:
        """Whether a new trajectory would have to wait for a retriever."""
        return bool(self._search.outage) or self._search.backpressure

    async def __call__(self, query: str) -> SearchResult:
        with self._stats.waits.blocked_on("retriever"), span("search", query=query) as traced:
            result = await self._search(query)
            traced.set(passages=len(result.passages))
            if result.error:
                traced.fail(result.error)
        counts = self._stats.counts
        counts["searches"] += 1
        self._stats.time("search_seconds", result.latency_s)
        if result.error:
            counts["search_errors"] += 1
            counts[f"search_errors_{self._labels(result.error)}"] += 1
        else:
            counts["search_outcome_found" if result.passages else "search_outcome_nothing"] += 1
        return result


class InstrumentedTool:
    """Counts the calls of a tool: all calls, invalid calls by the policy, and failures of the tool by cause."""

    def __init__(self, tool: Tool, stats: Stats) -> None:
        self.name = tool.name
        self._tool, self._stats = tool, stats
        self._labels = CauseLabels()
        for kind in ("calls", "invalid_calls", "errors"):
            stats.counts[f"tool_{kind}_{self.name}"] += 0

    async def __call__(self, argument: str) -> ToolResult:
        with self._stats.waits.blocked_on("tool"), span("tool", tool=self.name) as traced:
            result = await self._tool(argument)
            if result.error:
                traced.fail(result.error)
        counts = self._stats.counts
        counts[f"tool_calls_{self.name}"] += 1
        counts[f"tool_invalid_calls_{self.name}"] += bool(result.mistake)
        counts[f"tool_errors_{self.name}"] += bool(result.error)
        if result.error:
            counts[f"tool_failures_{self.name}/{self._labels(result.error[:CAUSE_CHARS])}"] += 1
        return result

    async def close(self) -> None:
        await self._tool.close()


def with_instrumented_tools(environment: Environment, stats: Stats) -> Environment:
    """Return the environment with tools that count into `stats` (`tool_calls_NAME` and so on, initially 0)."""
    return replace(environment, tools={name: InstrumentedTool(tool, stats) for name, tool in environment.tools.items()})
