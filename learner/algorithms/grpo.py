"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300): the group is the baseline, no critic.

With `normalize_std: false`, `aggregation: seq_mean_token_sum` and a constant `aggregation_length` it is Dr. GRPO
(arXiv 2503.20783); with `clip_high` above `clip_low` and `token_mean`, the loss of DAPO (arXiv 2503.14476).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.advantages import Outcomes, grpo_advantages
from learner.algorithms.surrogate import ClippedSurrogate
from learner.config_algorithm import GrpoSettings


class Grpo(ClippedSurrogate):
    """Advantage: the reward against its group's mean, in standard deviations of the group."""

    def __init__(self, settings: GrpoSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """[n] float64, one for each trajectory; 0 for those that do not vote."""
        s = self._settings
        return grpo_advantages(outcomes, normalize_std=s.normalize_std, ddof=s.std_ddof, epsilon=s.epsilon)
