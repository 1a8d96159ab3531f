"""Per turn: what a search brought that no earlier one had (`evidence`), as a share of all there is to find.

The sum over the turns is at most 1, and finding the same again earns nothing, so searching more is no way to more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout_server.reward.base import Outcome, TurnReward, WeightedReward
from rollout_server.reward.evidence import By, found, targets
from rollout_server.reward.io import Io


class TurnRetrieval:
    """New targets of each turn over all targets."""

    name = "turn_retrieval"

    def __init__(self, by: By) -> None:
        self._by: By = by

    async def per_turn(self, outcome: Outcome) -> Sequence[float]:
        wanted = targets(outcome.question, self._by)
        seen: set[str] = set()
        earned = []
        for turn in outcome.turns:
            new = found(outcome.question, turn, self._by) - seen
            seen |= new
            earned.append(len(new) / len(wanted) if wanted else 0.0)
        return earned


class TurnRetrievalSettings(WeightedReward):
    """Each turn earns the share of gold answer and supporting passages that it was the first to bring."""

    type: Literal["turn_retrieval"] = "turn_retrieval"
    by: By = "either"
    """What is looked for: `answer`, `passage` (the question's `supporting_ids`) or `either`."""

    def build(self, io: Io) -> TurnReward:
        return TurnRetrieval(self.by)
