"""Divergence PPO (arXiv 2602.04879), the default loss of prime-rl: GRPO with a trust region in probabilities."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses.policy import Surrogate
from learner.algorithms.losses.trust_region import dppo
from learner.config.algorithm import DppoSettings


class Dppo(Grpo):
    """Bounds changes of probability: a rare token may grow by a large factor, a likely one may not fall far."""

    def __init__(self, settings: DppoSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the surrogate: the ratio if the token's probability has not moved too far, else 0."""
        s = self._settings
        return dppo(
            inputs.logprobs,
            old,
            inputs.advantages,
            inputs.mask,
            low=s.clip_low,
            high=s.clip_high,
            divergence=s.divergence,
            symmetric=s.symmetric,
            cap=s.ratio_cap or torch.inf,
        )
