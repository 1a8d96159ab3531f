"""Advantages from outcomes (pure numpy, float64): one number for each trajectory, before anything is packed.

A trajectory that does not vote (it ended for reasons of infrastructure) counts in no baseline and gets 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.advantages.outcomes import Float64, Outcomes

SAME = 1e-9
"""Rewards of one group that differ by less than this, relative to their size, are one reward: 0.1 + 0.2 is not 0.3."""


def grpo_advantages(outcomes: Outcomes, *, normalize_std: bool, ddof: int, epsilon: float) -> Float64:
    """[n] float64: (r - mean of the group) / (std of the group + epsilon) (GRPO, arXiv 2402.03300, section 4.1.2).

    normalize_std=False leaves the division out (Dr. GRPO, arXiv 2503.20783). A group whose voters all have the same
    reward, and a group with one voter, get exactly 0.
    """
    out = np.zeros(len(outcomes.rewards))
    for members in _voters(outcomes):
        rewards = outcomes.rewards[members]
        centred = rewards - rewards.mean()
        out[members] = centred / (rewards.std(ddof=ddof) + epsilon) if normalize_std else centred
    return out


def rloo_advantages(outcomes: Outcomes) -> Float64:
    """[n] float64: r - mean of the others in the group (RLOO, arXiv 2402.14740, equation 8)."""
    out = np.zeros(len(outcomes.rewards))
    for members in _voters(outcomes):
        rewards = outcomes.rewards[members]
        out[members] = (rewards - rewards.mean()) * (len(members) / (len(members) - 1))
    return out


def _voters(outcomes: Outcomes) -> list[npt.NDArray[np.int64]]:
    """Indices of the voters of each group in which at least two voters differ."""
    groups = [np.flatnonzero((outcomes.group == g) & outcomes.votes) for g in np.unique(outcomes.group)]
    return [members for members in groups if len(members) > 1 and not _same(outcomes.rewards[members])]


def _same(rewards: Float64) -> bool:
    return bool(np.ptp(rewards) <= SAME * max(1.0, float(np.abs(rewards).max())))
