"""Group sequence policy optimisation (arXiv 2507.18071): GRPO's advantages, with ratio and clip per trajectory."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses.policy import Surrogate, gspo


class Gspo(Grpo):
    """Clips whole trajectories, the unit that is rewarded."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the surrogate, clipped on the geometric mean of the trajectory's ratios."""
        s = self.policy_settings
        return gspo(
            inputs.logprobs,
            old,
            inputs.advantages,
            inputs.trajectory,
            inputs.mask,
            low=s.clip_low,
            high=s.clip_high,
        )
