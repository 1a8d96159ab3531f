"""Credit of single turns: by their own rewards (process rewards), or by what their searches found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from learner.algorithms.advantages.outcomes import SAME, Bool, Float64, Int64, Outcomes, same, valid_by_group
from protocol.messages import Owner, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Turns:
    """The turns of the n trajectories of a batch; K is the largest number of turns.

    rewards  [n, K] float64; a row adds up to the trajectory's reward, 0 where a turn was not reached
    reached  [n, K] bool, True where the policy took the turn
    tokens   [n, K] int64, tokens that the policy sampled in the turn
    found    for each trajectory, for each of its turns, the passages returned to it: empty if it did not search, or
             wrote the same tokens as an earlier turn
    """

    rewards: Float64
    reached: Bool
    tokens: Int64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    found: Sequence[Sequence[frozenset[str]]] = ()

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
        tokens, found = np.zeros(rewards.shape, np.int64), []
        for i, trajectory in enumerate(t for g in groups for t in g.trajectories):
            turns: list[set[str]] = []
            written = [s.ids.tobytes() for s in trajectory.segments if s.owner is Owner.POLICY]
            for segment in trajectory.segments:
                if segment.owner is Owner.POLICY:
                    tokens[i, len(turns)] = len(segment.ids)
                    turns.append(set())
                elif turns and written[len(turns) - 1] not in written[: len(turns) - 1]:
                    turns[-1].update(segment.passage_ids)
            found.append([frozenset(turn) for turn in turns])
        return cls(rewards, reached, tokens, found)


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


def calibrated_turns(turns: Turns, outcomes: Outcomes, advantages: Float64, *, right: float = 0.7) -> Float64:
    """Return [n, K] float64: `advantages` [n] of the trajectories, by turn; 0 where a turn was not reached.

    CalibAdv (arXiv 2604.18235), which needs no labels. A turn before the last, of a trajectory with A < 0, gets
    A (1 - q): q is the share of its passages that were not returned to an earlier turn, and were returned to a best
    trajectory of the group (equal to the group's best reward, at least `right`); 0 if more than one of its passages was
    returned to one earlier turn. Then the positive advantages of the last turns of a group are scaled so that they and
    the negative ones have equal sums over tokens; if one sign is missing, both become 0.
    """
    out = np.where(turns.reached, advantages[:, None], 0.0)
    for members in valid_by_group(outcomes):
        rewards = outcomes.rewards[members]
        best = members[(rewards >= rewards.max() - SAME) & (rewards >= right)]
        known = {passage for i in best for turn in turns.found[i] for passage in turn}
        for i in members[advantages[members] < 0]:
            for k, passages in enumerate(turns.found[i][:-1]):
                before = turns.found[i][:k]
                if passages and not any(len(passages & earlier) > 1 for earlier in before):
                    out[i, k] *= 1 - len((passages & known).difference(*before)) / len(passages)
        ends = members[turns.reached[members].any(1)]
        last = turns.reached[ends].sum(1) - 1
        sums = out[ends, last] * turns.tokens[ends, last]
        up, down = sums[sums > 0].sum(), -sums[sums < 0].sum()
        scale = np.where(sums > 0, down / up, 1.0) if up and down else 0.0
        out[ends, last] *= scale
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


def _earned(trajectory: Trajectory) -> list[float]:
    earned = [s.reward for s in trajectory.segments if s.owner is Owner.POLICY]
    if earned:
        earned[-1] += trajectory.reward - sum(s.reward for s in trajectory.segments)
    return earned
