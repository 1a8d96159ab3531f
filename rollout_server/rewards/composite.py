"""Combine rewards: their weighted sum, with every part kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout_server.rewards.base import Reward, RewardError, RewardInput, TurnReward


@dataclass(frozen=True)
class TrajectoryReward:
    """Reward of a trajectory.

    reward  weighted sum of all parts, including rewards per turn
    parts   unweighted parts by name; for a reward per turn, the sum over the turns
    turns   weighted reward of each turn
    """

    reward: float
    parts: dict[str, float]
    turns: tuple[float, ...]


class RewardPart(NamedTuple):
    """One reward, its weight, and the data sets whose questions it scores (empty: all)."""

    reward: Reward | TurnReward
    weight: float
    sources: tuple[str, ...] = ()


class CompositeReward:
    """Computes all `parts` that apply to a question's source concurrently."""

    def __init__(self, parts: Sequence[RewardPart | tuple[Reward | TurnReward, float]]) -> None:
        self._parts = tuple(RewardPart(*part) for part in parts)

    async def __call__(self, outcome: RewardInput) -> TrajectoryReward:
        """Return the reward.

        Raises RewardError for a non-finite score, for a question whose source no part scores, or the first error of a
        part.
        """
        source = outcome.question.source
        scored = [part for part in self._parts if not part.sources or source in part.sources]
        if self._parts and not scored:
            raise RewardError(f"no reward of rollout.episode.rewards has {source!r} among its `sources`")
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(_score(part.reward, outcome), name=part.reward.name) for part in scored]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        total, turns = 0.0, [0.0] * len(outcome.turns)
        parts: dict[str, float] = {}
        for (reward, weight, _), task in zip(scored, asked, strict=True):
            whole, each = task.result()
            parts[reward.name] = whole
            total += weight * whole
            turns = [earned + weight * one for earned, one in zip(turns, each, strict=True)] if each else turns
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of {parts} is {total}")
        return TrajectoryReward(total, parts, tuple(turns))


async def _score(reward: Reward | TurnReward, outcome: RewardInput) -> tuple[float, tuple[float, ...]]:
    """Return the score of the trajectory, and of each turn for a reward per turn."""
    each: tuple[float, ...] = ()
    if isinstance(reward, TurnReward):
        each = tuple(map(float, await reward.per_turn(outcome)))
        if len(each) != len(outcome.turns):
            raise RewardError(f"reward {reward.name} returned {len(each)} numbers for {len(outcome.turns)} turns")
        whole = math.fsum(each) if all(map(math.isfinite, each)) else math.nan
    else:
        whole = float(await reward(outcome))
    if not math.isfinite(whole):
        raise RewardError(f"reward {reward.name} is {whole}")
    return whole, each
