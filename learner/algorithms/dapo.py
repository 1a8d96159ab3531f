"""DAPO (arXiv 2503.14476): GRPO with clip-higher, the token mean, dynamic sampling and a soft penalty on length.

Clip, aggregation and `filter` are its settings' defaults; this file adds only the shaping of rewards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from learner.algorithms.advantages.outcomes import Outcomes, overlong
from learner.algorithms.grpo import Grpo
from learner.config.algorithm import DapoSettings


class Dapo(Grpo):
    """GRPO's advantages, from rewards reduced by up to `overlong_penalty` for length."""

    def __init__(self, settings: DapoSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""
        s = self._settings
        if s.overlong_length:
            shaped = overlong(
                outcomes.rewards,
                outcomes.lengths,
                max_length=s.overlong_length,
                buffer=s.overlong_buffer,
                penalty=s.overlong_penalty,
            )
            outcomes = replace(outcomes, rewards=shaped)
        return super().advantages(outcomes)
