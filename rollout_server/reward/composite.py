"""Several rewards as one number: their sum by weight, with every part kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout_server.reward.base import Outcome, Reward, RewardError


class Composite:
    """Scores an outcome by each of `parts` (reward, weight)."""

    def __init__(self, parts: Sequence[tuple[Reward, float]]) -> None:
        self._parts = tuple(parts)

    async def __call__(self, outcome: Outcome) -> tuple[float, dict[str, float]]:
        """The weighted sum and the unweighted parts by name. Raises RewardError for a number that is not finite."""
        scores = {reward.name: float(await reward(outcome)) for reward, _ in self._parts}
        for name, score in scores.items():
            if not math.isfinite(score):
                raise RewardError(f"reward {name} is {score}")
        total = sum(scores[reward.name] * weight for reward, weight in self._parts)
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of {scores} is {total}")
        return total, scores
