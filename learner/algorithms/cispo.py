"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, and every token keeps its gradient."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.grpo import Grpo
from learner.algorithms.losses.policy import Surrogate, cispo


class Cispo(Grpo):
    """Clip importance weights, not updates: rare but decisive tokens keep a gradient."""

    def surrogate(self, inputs: TokenInputs, old: torch.Tensor) -> Surrogate:
        """Return REINFORCE with clipped importance weights."""
        s = self.policy_settings
        return cispo(inputs.logprobs, old, inputs.advantages, inputs.mask, lower=1 - s.clip_low, upper=1 + s.clip_high)
