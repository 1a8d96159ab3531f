"""Geometric-mean policy optimisation (arXiv 2507.20673): GRPO's advantages, log-ratios clipped token by token, and of a
trajectory the geometric mean of what is left.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses import Surrogate, gmpo


class Gmpo(Grpo):
    """One outlier among the tokens moves a geometric mean little."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the loss, whose clip is on log-ratios: clip_low and clip_high bound them themselves."""
        s = self.policy_settings
        return gmpo(
            inputs.logprobs, old, inputs.advantages, inputs.trajectory, inputs.mask, low=s.clip_low, high=s.clip_high
        )
