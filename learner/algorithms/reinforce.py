"""REINFORCE (Williams 1992): the plain gradient of the expected reward.

The engines sampled the tokens, so the loss carries an importance weight of the learner's policy over theirs
(`correction`); on-policy it is 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.group import reinforce_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs
from learner.algorithms.losses.policy import Surrogate, reinforce
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.algorithm import ReinforceSettings


class Reinforce(PolicyAlgorithm):
    """Advantage: the reward, minus the mean of the batch or the group if so configured."""

    def __init__(self, settings: ReinforceSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""
        return reinforce_advantages(outcomes, baseline=self._settings.baseline)

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return -A log policy."""
        return reinforce(inputs.logprobs, old, inputs.advantages, inputs.mask)
