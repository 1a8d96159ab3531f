"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300): the group is the baseline, no critic.

By their settings alone this is also Dr. GRPO (arXiv 2503.20783), EMA-PG (arXiv 2602.04417) and decoupled PPO without
a critic (AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.advantages import Outcomes, grpo_advantages
from learner.algorithms.policy import PolicyAlgorithm
from learner.config_policy import GroupSettings


class Grpo(PolicyAlgorithm):
    """Advantage: the reward against its group's mean, in standard deviations of the group."""

    def __init__(self, settings: GroupSettings) -> None:
        super().__init__(settings)
        self._group = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """[n] float64, one for each trajectory; 0 for those that do not vote."""
        s = self._group
        return grpo_advantages(outcomes, std=s.std, ddof=s.std_ddof, epsilon=s.epsilon)
