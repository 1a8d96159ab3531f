"""Rewards of single turns (process rewards): what each turn earned, and which tokens it credits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from learner.algorithms.advantages.outcomes import Bool, Float64, Int64, Outcomes, same, valid_by_group
from protocol.messages import Owner, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Turns:
    """Rewards of the turns of the n trajectories of a batch; K is the largest number of turns.

    rewards  [n, K] float64; a row adds up to the trajectory's reward, 0 where a turn was not reached
    reached  [n, K] bool, True where the policy took the turn
    """

    rewards: Float64
    reached: Bool

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> Turns:
        """Return the turns of every trajectory, in the order of the groups (and of `Outcomes.of`).

        A turn is a segment of the policy; it earns the segment's reward. The last turn also earns the outcome: the
        trajectory's reward minus those of its segments. A trajectory without a turn has a row of zeros.
        """
        each = [_earned(t) for g in groups for t in g.trajectories]
        width = max((len(x) for x in each), default=0)
        rewards, reached = np.zeros((len(each), width)), np.zeros((len(each), width), bool)
        for i, earned in enumerate(each):
            rewards[i, : len(earned)], reached[i, : len(earned)] = earned, True
        return cls(rewards, reached)


def turn_of_tokens(trajectory: Trajectory) -> Int64:
    """Return [T] int64: the turn, from 0, in which the policy sampled each token; -1 for tokens that it did not
    sample."""
    parts, turn = [np.zeros(0, np.int64)], 0
    for segment in trajectory.segments:
        mine = segment.owner is Owner.POLICY
        parts.append(np.full(len(segment.ids), turn if mine else -1, np.int64))
        turn += mine
    return np.concatenate(parts)


def normalized_turns(
    turns: Turns,
    outcomes: Outcomes,
    *,
    scope: Literal["turn", "group"] = "turn",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Float64:
    """Return [n, K] float64: (r - mean) / (deviation + epsilon) of each turn's reward; 0 where a turn was not reached.

    scope="group" takes the moments over all turns of all siblings (process supervision of GRPO, arXiv 2402.03300,
    section 4.1.3). scope="turn" takes them over the same turn of the siblings that reached it, so that a late turn,
    which only some reach, is compared with its like. Invalid trajectories count nowhere and get 0. A turn with nothing
    to compare with, or only equal rewards, also gets 0. `turn_returns` of the result, with gamma 1, is the paper's
    advantage.
    """
    out = np.zeros_like(turns.rewards)
    for members in valid_by_group(outcomes):
        taken = np.zeros_like(turns.reached)
        taken[members] = turns.reached[members]
        columns = [np.arange(taken.shape[1])] if scope == "group" else np.arange(taken.shape[1])[:, None]
        for column in columns:
            cells = np.zeros_like(taken)
            cells[:, column] = taken[:, column]
            rewards = turns.rewards[cells]
            if len(rewards) > 1 and not same(rewards):
                out[cells] = (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + epsilon)
    return out


def turn_returns(turn_rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return [B, K]: G_k = sum over j >= k of gamma^(j - k) * r_j; discounted per turn, not per token.

    turn_rewards [B, K] of any float dtype, 0 for turns that were not reached. A constant (no gradient).
    """
    given = turn_rewards.detach().double()
    out = torch.zeros_like(given)
    carried = given.new_zeros(len(given))
    for k in reversed(range(given.shape[1])):
        carried = given[:, k] + gamma * carried
        out[:, k] = carried
    return out.to(turn_rewards.dtype)


def turn_advantages(
    turn_rewards: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor, *, gamma: float
) -> torch.Tensor:
    """Return [B, T]: each token gets the return of its turn: its own reward plus the later ones, discounted per turn.

    turn_rewards  [B, K] raw, centred or normalised (`normalized_turns`)
    turn          [B, T] int64 in [0, K) where the mask holds, anything elsewhere
    mask          [B, T] bool; the result is 0 where it is False
    """
    if not turn_rewards.shape[1]:
        return torch.zeros(mask.shape, dtype=turn_rewards.dtype, device=turn_rewards.device)
    returns = turn_returns(turn_rewards, gamma)
    return torch.where(mask, returns.gather(1, torch.where(mask, turn, 0)), 0.0)


def _earned(trajectory: Trajectory) -> list[float]:
    earned = [s.reward for s in trajectory.segments if s.owner is Owner.POLICY]
    if earned:
        earned[-1] += trajectory.reward - sum(s.reward for s in trajectory.segments)
    return earned
