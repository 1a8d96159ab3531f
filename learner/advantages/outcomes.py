"""What is known of the trajectories of a batch before anything is computed (pure numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.messages import TrajectoryGroup

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcomes:
    """What is known of the n trajectories of a batch.

    rewards  [n] float64
    votes    [n] bool
    group    [n] int64, equal for the trajectories of one group
    """

    rewards: Float64
    votes: npt.NDArray[np.bool_]
    group: npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> Outcomes:
        """The outcomes of every trajectory, in the order of the groups."""
        pairs = [(number, t) for number, g in enumerate(groups) for t in g.trajectories]
        return cls(
            np.array([t.reward for _, t in pairs], np.float64),
            np.array([t.status.votes for _, t in pairs], bool),
            np.array([number for number, _ in pairs], np.int64),
        )

    def shuffled(self, seed: int) -> Outcomes:
        """The same with the rewards of those that vote permuted among them, whatever their group."""
        voters = np.flatnonzero(self.votes)
        rewards = self.rewards.copy()
        rewards[voters] = rewards[np.random.default_rng(seed).permutation(voters)]
        return Outcomes(rewards, self.votes, self.group)
