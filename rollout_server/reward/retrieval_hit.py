"""Whether the searches brought what they should: gold answer or supporting passage in an observation (`evidence`).

Search-R1's `is_retrieval_correct` (`qa_em_format.py`) with `by: answer`, on passages only and by whole words.
"""

from __future__ import annotations

from typing import Literal

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.evidence import By, found, targets
from rollout_server.reward.io import Io


class RetrievalHit:
    """1 when one target was shown, 0 when none was or there is none; with `share`, the share of targets shown."""

    name = "retrieval_hit"

    def __init__(self, settings: RetrievalHitSettings) -> None:
        self._by, self._share = settings.by, settings.share

    async def __call__(self, outcome: Outcome) -> float:
        wanted = targets(outcome.question, self._by)
        hits = frozenset[str]().union(*(found(outcome.question, turn, self._by) for turn in outcome.turns))
        if not wanted:
            return 0.0
        return len(hits) / len(wanted) if self._share else float(bool(hits))


class RetrievalHitSettings(WeightedReward):
    """1 when the gold answer or a supporting passage stood in an observation."""

    type: Literal["retrieval_hit"] = "retrieval_hit"
    by: By = "either"
    """What is looked for: `answer` (gold answer in the text), `passage` (ids or titles in the question's
    `supporting_ids`), or `either`."""
    share: bool = False
    """Score the share of what is looked for, not whether any of it was shown."""

    def build(self, io: Io) -> Reward:
        return RetrievalHit(self)
