"""REINFORCE leave-one-out (arXiv 2402.14740): the baseline of a trajectory is the mean of the others in its group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.algorithms.advantages.group import rloo_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.policy import PolicyAlgorithm


class Rloo(PolicyAlgorithm):
    """Advantage: the reward minus the mean of the others; the baseline does not depend on the trajectory itself."""

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""
        return rloo_advantages(outcomes)
