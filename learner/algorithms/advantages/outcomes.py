"""Outcomes of the trajectories of a batch, and rewards shaped by length (pure numpy, float64).

Filter groups on the raw rewards, before they are shaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.messages import Status, TrajectoryGroup

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

SAME = 1e-9
"""Rewards are equal if they differ by less than this, relative to their size: 0.1 + 0.2 equals 0.3."""


@dataclass(frozen=True)
class Outcomes:
    """Rewards and facts of the n trajectories of a batch.

    rewards    [n] float64
    valid      [n] bool, False if an infrastructure failure ended the trajectory
    group      [n] int64, equal for the trajectories of one group; any numbers, in any order
    lengths    [n] int64, tokens that the policy sampled; default: all have length 1
    truncated  [n] bool, True if the token budget ended it; default: all False
    parts      name -> [n] float64, the unweighted parts of the rewards; 0 where a trajectory has no such part

    Raises ValueError when the arrays differ in length.
    """

    rewards: Float64
    valid: Bool
    group: Int64
    lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    truncated: Bool = field(default_factory=lambda: np.zeros(0, bool))
    parts: dict[str, Float64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.rewards)
        if not len(self.lengths):
            object.__setattr__(self, "lengths", np.ones(n, np.int64))
        if not len(self.truncated):
            object.__setattr__(self, "truncated", np.zeros(n, bool))
        sizes = {len(x) for x in (self.valid, self.group, self.lengths, self.truncated, *self.parts.values())}
        if sizes != {n}:
            raise ValueError(f"arrays differ in length: {n} rewards, other arrays {sorted(sizes)}")

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> Outcomes:
        """Return the outcomes of every trajectory, in the order of the groups."""
        pairs = [(number, t) for number, g in enumerate(groups) for t in g.trajectories]
        names = sorted({name for _, t in pairs for name in t.rewards})
        return cls(
            rewards=np.array([t.reward for _, t in pairs], np.float64),
            valid=np.array([t.status.is_valid for _, t in pairs], bool),
            group=np.array([number for number, _ in pairs], np.int64),
            lengths=np.array([t.num_sampled for _, t in pairs], np.int64),
            truncated=np.array([t.status is Status.TRUNCATED for _, t in pairs], bool),
            parts={name: np.array([t.rewards.get(name, 0.0) for _, t in pairs], np.float64) for name in names},
        )

    def shuffled(self, seed: int) -> Outcomes:
        """Return a copy with the rewards of the valid trajectories permuted among them, across groups.

        The parts move with their reward; lengths and truncation stay with their trajectory.
        """
        voters = np.flatnonzero(self.valid)
        order = np.arange(len(self.rewards))
        order[voters] = np.random.default_rng(seed).permutation(voters)
        return replace(
            self, rewards=self.rewards[order], parts={name: part[order] for name, part in self.parts.items()}
        )

    def part(self, name: str) -> Outcomes:
        """Return a copy with one part of the reward, unweighted, as the reward. Raises UserError for an unknown part;
        without valid trajectories, which bring no parts, it is 0.
        """
        if name not in self.parts and self.valid.any():
            raise UserError(
                f"no trajectory of the batch has a reward named {name!r}",
                why=f"learner.algorithm.parts names it; known: {', '.join(sorted(self.parts)) or 'none'}",
                todo="use the name of a reward in rollout.episode.rewards, or add this reward there",
            )
        return replace(self, rewards=self.parts.get(name, np.zeros(len(self.rewards))))


def same(rewards: Float64) -> bool:
    """Return whether the rewards [m], at least one, are equal up to rounding (`SAME`)."""
    return bool(np.ptp(rewards) <= tolerance(rewards))


def tolerance(rewards: Float64) -> float:
    """Return the largest difference at which two of the rewards [m >= 1] count as equal."""
    return SAME * max(1.0, float(np.abs(rewards).max()))


def valid_by_group(outcomes: Outcomes) -> list[Int64]:
    """Return, for each group with a valid trajectory, the indices of its valid trajectories in ascending order."""
    voters = np.flatnonzero(outcomes.valid)
    voters = voters[np.argsort(outcomes.group[voters], kind="stable")]
    edges = np.flatnonzero(np.diff(outcomes.group[voters])) + 1
    return [members for members in np.split(voters, edges) if len(members)]


def contested(outcomes: Outcomes) -> list[Int64]:
    """Return those of `valid_by_group` whose rewards differ: the others carry no learning signal within their group."""
    return [m for m in valid_by_group(outcomes) if len(m) > 1 and not same(outcomes.rewards[m])]


def informative(rewards: Float64, valid: Bool) -> bool:
    """Return whether a group, rewards [G] and valid [G], has two valid rewards that differ by more than rounding.

    Dynamic sampling keeps such groups (DAPO, arXiv 2503.14476, section 3.2, states it as 0 < correct < G; this holds
    for any reward). verl compares `np.std(metric)` with 0 exactly, so (0.1 + 0.2, 0.3) passes there, and keeps groups
    of one; slime requires std > 1e-6. Here a group with one valid trajectory is not informative: its advantage would be
    0.
    """
    voting = np.asarray(rewards, np.float64)[np.asarray(valid, bool)]
    return len(voting) > 1 and not same(voting)


def overlong(rewards: Float64, lengths: Int64, *, max_length: int, buffer: int, penalty: float = 1.0) -> Float64:
    """Return [n] float64: rewards - penalty * excess, the soft overlong punishment of DAPO (arXiv 2503.14476, equation
    13).

    rewards [n], lengths [n] in sampled tokens (observations are excluded; verl counts them). excess is 0 up to
    max_length - buffer, grows linearly to 1 at max_length and stays there; in AReaL, and in verl's DAPO, it keeps
    growing. buffer=0 is a step: 1 above max_length. Raises ValueError unless 0 <= buffer <= max_length and
    max_length > 0.
    """
    if not 0 <= buffer <= max_length or max_length <= 0:
        raise ValueError(f"a buffer of {buffer} does not fit into a length of {max_length}")
    over = np.asarray(lengths, np.float64) - (max_length - buffer)
    excess = np.clip(over / buffer, 0.0, 1.0) if buffer else (over > 0).astype(np.float64)
    return np.asarray(rewards, np.float64) - penalty * excess
