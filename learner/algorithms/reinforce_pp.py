"""REINFORCE++ (arXiv 2501.03262): discounted rewards of tokens minus the divergence, whitened over the batch; clipped.

The baseline is the batch's mean (by the whitening), or, with `baseline: group`, the group's mean before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.gae import discounted_returns
from learner.algorithms.advantages.group import reinforce_advantages, reinforce_pp_baseline_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenAdvantages, TokenScores
from learner.algorithms.correction import over_rows
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.algorithm import ReinforcePpSettings


class ReinforcePp(PolicyAlgorithm):
    """Advantage of a token: the discounted reward from that token on."""

    def __init__(self, settings: ReinforcePpSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64, one per trajectory: its reward, centred in its group if so configured."""
        if self._settings.baseline == "group":
            return reinforce_pp_baseline_advantages(outcomes)
        return reinforce_advantages(outcomes, baseline="none")

    def token_advantages(self, scores: Sequence[TokenScores], rewards: Sequence[torch.Tensor]) -> list[TokenAdvantages]:
        """Return the discounted sums of the rewards of tokens."""
        found = []
        for s, earned in zip(scores, rewards, strict=True):
            if self._settings.baseline == "group":
                earned = _centred(s, earned)
            (returns,) = over_rows(s, lambda mask, r: (discounted_returns(r, mask, self._settings.gamma),), earned)
            found.append(TokenAdvantages(returns))
        return found


def _centred(scores: TokenScores, earned: torch.Tensor) -> torch.Tensor:
    """Return rewards whose sum per trajectory is centred in its group; the difference goes to the last token."""
    (moved,) = over_rows(scores, _to_last, scores.rewards, scores.advantages)
    return earned + moved


def _to_last(mask: torch.Tensor, rewards: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    last = mask.sum(1, keepdim=True).clamp(min=1) - 1
    shift = advantages.gather(1, last) - rewards.sum(1, keepdim=True)
    return (torch.zeros_like(rewards).scatter(1, last, shift),)
