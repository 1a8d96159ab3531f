"""A search with canned passages and scripted failures: for tests, benchmarks and dry runs without a retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from protocol.search import Passage
from protocol.settings import Settings
from rollout_server.search.base import SearchResult, SearchService, Ungoverned


class FakeSearch(Ungoverned):
    """Answers from a table.

    passages   query -> what it brings; any other query brings `otherwise`
    failures   one word for each of the first calls, "" for a call that works: ["", "timeout"] fails the second
    latency_s  seconds that each call takes
    """

    def __init__(
        self,
        passages: Mapping[str, Sequence[Passage]] | None = None,
        *,
        otherwise: Sequence[Passage] = (),
        failures: Sequence[str] = (),
        latency_s: float = 0.0,
    ) -> None:
        self._passages = dict(passages or {})
        self._otherwise = tuple(otherwise)
        self._failures = list(failures)
        self._latency_s = latency_s
        self.queries: list[str] = []

    async def __call__(self, query: str) -> SearchResult:
        call = len(self.queries)
        self.queries.append(query)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        error = self._failures[call] if call < len(self._failures) else ""
        found = () if error else tuple(self._passages.get(query, self._otherwise))
        return SearchResult(found, self._latency_s, error)


class FakeSearchSettings(Settings):
    """Canned passages instead of a retriever."""

    type: Literal["fake"] = "fake"
    passages: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Query -> contents of the passages it brings: title line, newline, text."""
    otherwise: tuple[str, ...] = ()
    """Contents of the passages for every other query."""
    failures: tuple[str, ...] = ()
    """One word for each of the first calls, empty for a call that works."""
    latency_s: float = Field(default=0.0, ge=0)
    """Seconds that each search takes."""

    def build(self) -> SearchService:
        return FakeSearch(
            {query: _passages(contents) for query, contents in self.passages.items()},
            otherwise=_passages(self.otherwise),
            failures=self.failures,
            latency_s=self.latency_s,
        )


def _passages(contents: Sequence[str]) -> list[Passage]:
    return [Passage(id=f"fake-{i}", contents=text) for i, text in enumerate(contents)]
