"""Geometric-mean policy optimisation (arXiv 2507.20673): GRPO's advantages, log-ratios clipped token by token, and the
geometric mean of the clipped ratios per trajectory.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses.policy import Surrogate, gmpo


class Gmpo(Grpo):
    """A geometric mean is robust against a single outlier among the tokens."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the loss, clipped on log-ratios: clip_low and clip_high bound the log-ratios."""
        s = self.policy_settings
        return gmpo(
            inputs.logprobs, old, inputs.advantages, inputs.trajectory, inputs.mask, low=s.clip_low, high=s.clip_high
        )
