"""Search: the seam, the client of the retriever, the fake."""

from __future__ import annotations

from typing import Literal

from protocol.settings import Settings
from rollout_server.search.base import SearchResult, SearchService, Ungoverned

# A search that finds nothing: the ablation that shows whether a policy answers from what it reads.


class NoSearch(Ungoverned):
    """Every query brings an empty list, at once and without an error."""

    async def __call__(self, query: str) -> SearchResult:
        return SearchResult((), 0.0)


class NoSearchSettings(Settings):
    """Search switched off: the policy is told that nothing was found."""

    type: Literal["none"] = "none"

    def build(self) -> SearchService:
        return NoSearch()
