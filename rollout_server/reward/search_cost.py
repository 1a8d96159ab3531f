"""A price on searches: -min(cap, each * (searches - free)), never above 0.

A search that failed was made all the same. Calls of tools are no searches: they cost nothing here, and a setting of
each tool bounds them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.io import Io


class SearchCost:
    """See the module."""

    name = "search_cost"

    def __init__(self, settings: SearchCostSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: Outcome) -> float:
        costs = self._settings
        return 0.0 - min(costs.cap, costs.each * max(0, outcome.searches - costs.free))


class SearchCostSettings(WeightedReward):
    """Each search beyond the free ones costs; the score is 0 or below."""

    type: Literal["search_cost"] = "search_cost"
    each: float = Field(default=0.1, ge=0)
    """Cost of one search."""
    free: int = Field(default=1, ge=0)
    """Searches that cost nothing."""
    cap: float = Field(default=1.0, ge=0)
    """Most that a trajectory's searches cost."""

    def build(self, io: Io) -> Reward:
        return SearchCost(self)
