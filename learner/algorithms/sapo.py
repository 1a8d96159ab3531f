"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate instead of a clip."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses.policy import Surrogate, sapo


class Sapo(Grpo):
    """GRPO's advantages with a soft gate."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the surrogate: a gate on each token's ratio."""
        return sapo(inputs.logprobs, old, inputs.advantages, inputs.mask)
