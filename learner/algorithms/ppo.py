"""Proximal policy optimisation with a critic (arXiv 1707.06347) and generalised advantages (arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from learner.algorithms.advantages.gae import gae
from learner.algorithms.advantages.group import reinforce_advantages
from learner.algorithms.advantages.outcomes import Outcomes
from learner.algorithms.base import TokenAdvantages, TokenScores
from learner.algorithms.correction import over_rows
from learner.algorithms.policy import PolicyAlgorithm
from learner.config.algorithm import PpoSettings


class Ppo(PolicyAlgorithm):
    """Advantage of a token: the return minus the critic's estimate."""

    uses_critic = True

    def __init__(self, settings: PpoSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self.bootstraps = settings.bootstrap_truncated

    def advantages(self, outcomes: Outcomes) -> npt.NDArray[np.float64]:
        """Return [n] float64: the rewards, for the metrics; training uses `token_advantages`."""
        return reinforce_advantages(outcomes, baseline="none")

    def token_advantages(self, scores: Sequence[TokenScores], rewards: Sequence[torch.Tensor]) -> list[TokenAdvantages]:
        """Return GAE over the trained tokens of each trajectory; observations are skipped (see `advantages.gae`)."""
        found = []
        for s, earned in zip(scores, rewards, strict=True):
            assert s.values is not None
            last = torch.zeros_like(s.values) if s.last_values is None else s.last_values
            advantages, returns = over_rows(s, self._gae, earned, s.values, last)
            found.append(TokenAdvantages(advantages, returns))
        return found

    def _gae(
        self, mask: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        after = last[:, :1].sum(1)  # equal in all tokens of a row; without rows there is no column
        return gae(rewards, values, mask, self._settings.gamma, self._settings.lam, after)
