"""Exact match after Search-R1's normalisation (`verl/utils/reward_score/qa_em.py`), the best over all gold answers."""

from __future__ import annotations

import re
import string
from typing import Literal

from protocol.settings import Settings
from rollout_server.reward.base import Outcome, Reward

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation dropped, the articles a, an, the dropped, white space collapsed: in this order."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class ExactMatch:
    """1 when the answer equals a gold answer after normalisation, else 0."""

    name = "em"

    async def __call__(self, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        given = normalise(outcome.answer)
        return float(any(given == normalise(gold) for gold in outcome.question.answers))


class ExactMatchSettings(Settings):
    """1 when the answer equals a gold answer after normalisation, else 0."""

    type: Literal["em"] = "em"
    weight: float = 1.0
    """Factor in the trajectory's reward."""

    def build(self) -> Reward:
        return ExactMatch()
