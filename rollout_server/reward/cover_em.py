"""Cover match: a gold answer's words occur, in order and unbroken, in the answer (`subem_check` of Search-R1).

Whole words, unlike Search-R1's substring: the gold answer "no" is not covered by "I do not know".
"""

from __future__ import annotations

from typing import Literal

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.exact_match import normalise
from rollout_server.reward.io import Io


class CoverMatch:
    """1 when some gold answer occurs in the answer after normalisation, else 0."""

    name = "cover_em"

    async def __call__(self, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        return float(covers(outcome.answer, outcome.question.answers))


def covers(text: str, golds: tuple[str, ...]) -> bool:
    """Whether the words of some gold answer stand in `text`. A gold answer without words is never covered."""
    padded = f" {normalise(text)} "
    return any(f" {gold} " in padded for gold in map(normalise, golds) if gold)


class CoverMatchSettings(WeightedReward):
    """1 when a gold answer occurs in the answer as whole words, else 0."""

    type: Literal["cover_em"] = "cover_em"

    def build(self, io: Io) -> Reward:
        return CoverMatch()
