"""A training algorithm: PPO's clipped loss with the group's median reward as the baseline, which is robust to outliers.

Its line in `learner.config.algorithm.REGISTRY`: `MedianSettings: "examples.extensions.algorithm:Median"`
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.algorithms.advantages.outcomes import Outcomes, contested
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.policy import PolicySettings


class MedianSettings(PolicySettings):
    """Reward minus the median reward of the group."""

    type: Literal["median"] = "median"

    @property
    def group_baseline(self) -> bool:
        """Return True: the baseline is computed from the group."""
        return True


class Median(PolicyAlgorithm):
    """Clipped policy gradient; loss, divergence and corrections are those of `PolicyAlgorithm`."""

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64; 0 if all trajectories of a group have the same reward."""
        found = np.zeros(len(outcomes.rewards))
        for members in contested(outcomes):
            found[members] = outcomes.rewards[members] - np.median(outcomes.rewards[members])
        return found
