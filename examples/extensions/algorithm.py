"""A training algorithm: PPO's clipped loss on rewards against the median of their group, which one outlier cannot move.

Its line in `learner.config.algorithm.REGISTRY`: `MedianSettings: "examples.extensions.algorithm:Median"`
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.algorithms.advantages.outcomes import Outcomes, contested
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.policy import PolicySettings


class MedianSettings(PolicySettings):
    """The reward against its group's median."""

    type: Literal["median"] = "median"

    @property
    def group_baseline(self) -> bool:
        """The others of its group are the baseline."""
        return True


class Median(PolicyAlgorithm):
    """Clipped policy gradient; loss, divergence and corrections are those of `PolicyAlgorithm`."""

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64; 0 where the whole group has the same reward."""
        found = np.zeros(len(outcomes.rewards))
        for members in contested(outcomes):
            found[members] = outcomes.rewards[members] - np.median(outcomes.rewards[members])
        return found
