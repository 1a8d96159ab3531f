"""The seam to retrieval: a query in, passages out, and failures that have a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protocol.search import Passage


@dataclass(frozen=True)
class SearchResult:
    """What a search brought.

    error  "" or a short word, see `rollout_server.search.fault`. No passages and no error: nothing was found
    """

    passages: tuple[Passage, ...]
    latency_s: float
    error: str = ""


class Search(Protocol):
    """Searches for one query; never raises for the service's faults: they are `SearchResult.error`."""

    async def __call__(self, query: str) -> SearchResult: ...


class SearchService(Search, Protocol):
    """A search that a process owns: it is built once, shared by all rollouts, and closed in the end."""

    @property
    def outage(self) -> str:
        """Why no query can be answered now, "" when one can. Searches wait meanwhile; new work is better not begun."""

    @property
    def congested(self) -> bool:
        """Whether so many searches stand in line that new work is better not begun."""

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """From now on count in `counts`, and have what can be read at any moment in `gauges`."""

    async def close(self) -> None:
        """Let go of connections and of searches in flight. Safe to call twice."""


class Ungoverned:
    """What a search owes besides searching when it asks nobody: it is never away, and holds nothing."""

    @property
    def outage(self) -> str:
        return ""

    @property
    def congested(self) -> bool:
        return False

    def report(self, counts: Counter[str], gauges: dict[str, Callable[[], float]]) -> None:
        """It has nothing to report."""

    async def close(self) -> None:
        return None
