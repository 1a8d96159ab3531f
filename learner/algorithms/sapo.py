"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate instead of a clip."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses import Surrogate, sapo
from learner.config.algorithm import SapoSettings


class Sapo(Grpo):
    """GRPO's advantages with a soft gate."""

    def __init__(self, settings: SapoSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the surrogate: a gate on each token's ratio."""
        s = self._settings
        return sapo(
            inputs.logprobs,
            old,
            inputs.advantages,
            inputs.mask,
            tau_positive=s.tau_positive,
            tau_negative=s.tau_negative,
        )
