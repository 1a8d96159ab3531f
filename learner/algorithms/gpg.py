"""Group policy gradient (arXiv 2504.02546): REINFORCE with centred rewards, rescaled for groups without a learning
signal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.group import gpg_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs
from learner.algorithms.losses.policy import Surrogate, reinforce
from learner.algorithms.policy import PolicyAlgorithm


class Gpg(PolicyAlgorithm):
    """Advantages without a ratio, a clip or a deviation."""

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""
        return gpg_advantages(outcomes)

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return -A log policy."""
        return reinforce(inputs.logprobs, old, inputs.advantages, inputs.mask)
