"""Several rewards as one number: their sum by weight, with every part kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.rewards.base import Reward, RewardError, RewardInput, TurnReward


@dataclass(frozen=True)
class TrajectoryReward:
    """What a trajectory earned.

    reward  the whole, the turns' part included
    parts   by name, unweighted; of a reward per turn the sum over the turns
    turns   what each turn earned by itself, weighted: one number a turn
    """

    reward: float
    parts: dict[str, float]
    turns: tuple[float, ...]


class CompositeReward:
    """Scores an outcome by each of `parts` (reward, weight), all at the same time."""

    def __init__(self, parts: Sequence[tuple[Reward | TurnReward, float]]) -> None:
        self._parts = tuple(parts)

    async def __call__(self, outcome: RewardInput) -> TrajectoryReward:
        """Raises RewardError for a number that is not finite, and the first error of a part: the others are ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(_score(reward, outcome), name=reward.name) for reward, _ in self._parts]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        total, turns = 0.0, [0.0] * len(outcome.turns)
        parts: dict[str, float] = {}
        for (reward, weight), task in zip(self._parts, asked, strict=True):
            whole, each = task.result()
            parts[reward.name] = whole
            total += weight * whole
            turns = [earned + weight * one for earned, one in zip(turns, each, strict=True)] if each else turns
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of {parts} is {total}")
        return TrajectoryReward(total, parts, tuple(turns))


async def _score(reward: Reward | TurnReward, outcome: RewardInput) -> tuple[float, tuple[float, ...]]:
    """The score of the whole, and of each turn where it is a reward per turn."""
    each: tuple[float, ...] = ()
    if isinstance(reward, TurnReward):
        each = tuple(map(float, await reward.per_turn(outcome)))
        if len(each) != len(outcome.turns):
            raise RewardError(f"reward {reward.name} gave {len(each)} numbers for {len(outcome.turns)} turns")
        whole = math.fsum(each) if all(map(math.isfinite, each)) else math.nan
    else:
        whole = float(await reward(outcome))
    if not math.isfinite(whole):
        raise RewardError(f"reward {reward.name} is {whole}")
    return whole, each
