"""REINFORCE (Williams 1992): the gradient of the expected reward and nothing else.

The tokens were drawn by the engines, so the loss is weighed by how much more the learner's policy would have drawn
them (`correction`): on-policy that is 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages import Outcomes, reinforce_advantages
from learner.algorithms.base import TokenInputs
from learner.algorithms.losses import Surrogate, reinforce
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.algorithm import ReinforceSettings


class Reinforce(PolicyAlgorithm):
    """Advantage: the reward against the batch's mean, or the group's, or as it is."""

    def __init__(self, settings: ReinforceSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """[n] float64, one for each trajectory; 0 for those that do not vote."""
        return reinforce_advantages(outcomes, baseline=self._settings.baseline)

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """-A log policy."""
        return reinforce(inputs.logprobs, old, inputs.advantages, inputs.mask)
