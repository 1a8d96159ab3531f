"""Token F1 of the answer against the best gold answer (HotpotQA's, as in ReSearch's `re_search.py`)."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from rollout_server.reward.base import Outcome, Reward, WeightedReward
from rollout_server.reward.exact_match import comparable
from rollout_server.reward.io import Io

_WHOLE = frozenset({"yes", "no", "noanswer"})


def f1(answer: str, gold: str) -> float:
    """2PR / (P + R) over the multisets of normalised words; yes, no and noanswer count only when they are equal."""
    given, wanted = comparable(answer), comparable(gold)
    if given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return 0.0
    words, gold_words = given.split(), wanted.split()
    common = sum((Counter(words) & Counter(gold_words)).values())
    # 2PR / (P + R) with P = common / n and R = common / m is 2 common / (n + m)
    return 2 * common / (len(words) + len(gold_words)) if common else 0.0


class F1:
    """The best token F1 over the gold answers, 0 without an answer."""

    name = "f1"

    async def __call__(self, outcome: Outcome) -> float:
        if outcome.answer is None:
            return 0.0
        return max((f1(outcome.answer, gold) for gold in outcome.question.answers), default=0.0)


class F1Settings(WeightedReward):
    """Token F1 against the best gold answer."""

    type: Literal["f1"] = "f1"

    def build(self, io: Io) -> Reward:
        return F1()
