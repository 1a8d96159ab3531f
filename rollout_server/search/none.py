"""A search that finds nothing: the ablation that shows whether a policy answers from what it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from protocol.settings import Settings
from rollout_server.search.base import SearchResult, SearchService


class NoSearch:
    """Every query brings an empty list, at once and without an error."""

    async def __call__(self, query: str) -> SearchResult:
        return SearchResult((), 0.0)

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


class NoSearchSettings(Settings):
    """Search switched off: the policy is told that nothing was found."""

    type: Literal["none"] = "none"

    def build(self) -> SearchService:
        return NoSearch()
