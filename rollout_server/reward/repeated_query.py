"""Per turn: a search for what this trajectory has searched for already costs, at the turn that did it.

Two queries are the same when they are after Search-R1's normalisation (case, ASCII punctuation, articles, blanks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout_server.reward.base import Outcome, TurnReward, WeightedReward
from rollout_server.reward.exact_match import normalise
from rollout_server.reward.io import Io


class RepeatedQuery:
    """-1 for each turn whose query an earlier turn had, else 0."""

    name = "repeated_query"

    async def per_turn(self, outcome: Outcome) -> Sequence[float]:
        asked: set[str] = set()
        earned = []
        for turn in outcome.turns:
            # a query of nothing but punctuation is compared as it stands
            query = normalise(turn.query) or turn.query
            earned.append(-1.0 if query and query in asked else 0.0)
            asked.add(query)
        return earned


class RepeatedQuerySettings(WeightedReward):
    """-1 for every search that repeats an earlier one."""

    type: Literal["repeated_query"] = "repeated_query"

    def build(self, io: Io) -> TurnReward:
        return RepeatedQuery()
