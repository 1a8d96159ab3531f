"""A reward: 1 for an answer that is a number close to a gold answer, else 0.

Its line in `rollout_server.rewards.REGISTRY`: `NumberSettings: "examples.extensions.reward:NumberMatch"`
"""

import math
from typing import Literal

from pydantic import Field

from rollout_server.rewards.base import RewardInput, RewardSettingsBase


class NumberSettings(RewardSettingsBase):
    """Compare answers as numbers: 1,000 equals 1e3."""

    type: Literal["number"] = "number"
    tolerance: float = Field(default=0.01, ge=0)
    """Maximum relative difference to a gold answer."""


class NumberMatch:
    name = "number"

    def __init__(self, settings: NumberSettings) -> None:
        self._tolerance = settings.tolerance

    async def __call__(self, outcome: RewardInput) -> float:
        answer, golds = _number(outcome.answer or ""), map(_number, outcome.question.answers)
        return float(any(math.isclose(answer, gold, rel_tol=self._tolerance) for gold in golds))


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan  # not close to any number
