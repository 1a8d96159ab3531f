"""Exact match after Search-R1's normalisation (`verl/utils/reward_score/qa_em.py`), the best over all gold answers."""

from __future__ import annotations

import re
import string
from typing import Literal

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.io import Io

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation dropped, the articles a, an, the dropped, white space collapsed: in this order."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def comparable(text: str) -> str:
    """`normalise`, or where that leaves nothing the text with its articles, or with its punctuation: "A" is an answer.

    "" only for a text without a character.
    """
    return normalise(text) or " ".join(text.lower().translate(_PUNCTUATION).split()) or " ".join(text.lower().split())


def equal(answer: str, gold: str) -> bool:
    """Whether both are one answer. An empty answer equals none: Search-R1 and HotpotQA pay it for the gold "A"."""
    given = comparable(answer)
    return bool(given) and given == comparable(gold)


class ExactMatch:
    """1 when the answer equals a gold answer after normalisation, else 0."""

    name = "em"

    async def __call__(self, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        return float(any(equal(outcome.answer, gold) for gold in outcome.question.answers))


class ExactMatchSettings(WeightedReward):
    """1 when the answer equals a gold answer after normalisation, else 0."""

    type: Literal["em"] = "em"

    def build(self, io: Io) -> Reward:
        return ExactMatch()
