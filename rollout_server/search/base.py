"""The seam to retrieval: a query in, passages out, and failures that have a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.search import Passage


@dataclass(frozen=True)
class SearchResult:
    """What a search brought.

    error  "" or a short word: timeout, unreachable, overloaded (429, 503), http_NNN, garbage, too_large, closed
    """

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Searches for one query; never raises for the service's faults: they are `SearchResult.error`."""

    async def __call__(self, query: str) -> SearchResult: ...


class SearchService(Search, Protocol):
    """A search that a process owns: it is built once, shared by all rollouts, and closed in the end."""

    async def close(self) -> None:
        """Let go of connections and of searches in flight. Safe to call twice."""
