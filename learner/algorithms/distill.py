"""On-policy distillation (GKD, arXiv 2306.13649; prime-rl's `ref_kl`): towards a teacher, on what the policy wrote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.group import reinforce_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenInputs
from learner.algorithms.kl.estimators import log_ratio
from learner.algorithms.losses.policy import Surrogate
from learner.algorithms.losses.trust_region import moved_too_far
from learner.algorithms.policy import PolicyAlgorithm


class Distill(PolicyAlgorithm):
    """The surrogate is the divergence from the reference; correction and rejection apply to it."""

    distills = True

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64: the rewards, for the metrics only."""
        return reinforce_advantages(outcomes, baseline="none")

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the divergence, 0 for tokens whose probability has moved too far since they were sampled."""
        s, mask = self.policy_settings, inputs.mask
        below, above = moved_too_far(inputs.logprobs, old, mask, low=s.clip_low, high=s.clip_high, divergence="tv")
        loss = s.kl.coefficient * torch.where(mask & ~(below | above), self.divergence(inputs, old), 0.0)
        ratio = log_ratio(inputs.logprobs.detach(), old.detach(), mask).exp()
        ratio = torch.where(mask, ratio, 0.0)
        return Surrogate(loss, ratio, below | above, below, above, torch.zeros_like(mask))
