"""Group sequence policy optimisation (arXiv 2507.18071): GRPO's advantages, ratio and clip of whole trajectories."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses import Surrogate, gspo


class Gspo(Grpo):
    """The unit that is rewarded is the unit that is clipped."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return the clip on the geometric mean of the trajectory's ratios."""
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
