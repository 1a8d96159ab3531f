"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300): the group is the baseline, no critic.

With other settings this is also Dr. GRPO (arXiv 2503.20783), EMA-PG (arXiv 2602.04417) and decoupled PPO without
a critic (AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages import group
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.advantages.turns import Turns, calibrated_turns, normalized_turns, turn_returns
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.policy import GroupSettings

STD_DDOF = 1
"""Deviations divide by n - 1, as in verl, TRL, OpenRLHF, slime and AReaL."""
EPSILON = 1e-6
"""Added to a deviation, as in verl and slime."""


class Grpo(PolicyAlgorithm):
    """Advantage: the reward minus its group's mean, in standard deviations of the group."""

    def __init__(self, settings: GroupSettings) -> None:
        super().__init__(settings)
        self._group = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory; 0 for invalid ones."""
        s = self._group
        if s.parts:
            each = [weight * self._compared(outcomes.part(name)) for name, weight in s.parts.items()]
            found: npt.NDArray[np.float64] = np.sum(each, axis=0)
        else:
            found = self._compared(outcomes)
        if s.normalize_batch:
            found = group.normalized_batch(found, outcomes.valid, ddof=STD_DDOF, epsilon=EPSILON)
        return found

    def _compared(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        s = self._group
        match s.estimator:
            case "grpo":
                return group.grpo_advantages(outcomes, std=s.std, ddof=STD_DDOF, epsilon=EPSILON)
            case "rloo":
                return group.rloo_advantages(outcomes)
            case "opo":
                return group.opo_advantages(outcomes)
            case "max_rl":
                return group.max_rl_advantages(outcomes)
            case "pass_at_k":
                divides = s.std != "none"
                return group.pass_at_k_advantages(outcomes, epsilon=EPSILON, ddof=STD_DDOF, normalize_std=divides)

    def turn_advantages(self, outcomes: Outcomes, turns: Turns) -> npt.NDArray[np.float64] | None:
        """Return [n, K] float64 if turns have their own rewards: normalised, summed from each turn on; or calibrated by
        what their searches found; else None."""
        s = self._group
        if s.turns == "off":
            return None
        if s.turns == "calibrated":
            return calibrated_turns(turns, outcomes, self.advantages(outcomes), right=s.turn_right)
        normal = normalized_turns(turns, outcomes, scope=s.turns, ddof=STD_DDOF, epsilon=EPSILON)
        returns: npt.NDArray[np.float64] = turn_returns(torch.from_numpy(normal), s.turn_gamma).numpy()
        return returns
