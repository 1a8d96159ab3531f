"""The seam to retrieval: a query in, passages out, and failures that have a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.search import Passage


@dataclass(frozen=True)
class SearchResult:
    """What a search brought. `error` is "" or a short word (timeout, unreachable, http_500, garbage, overloaded)."""

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Searches for one query; never raises for the service's faults: they are `SearchResult.error`."""

    async def __call__(self, query: str) -> SearchResult: ...
