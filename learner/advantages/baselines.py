"""Advantages against something other than the siblings alone: nothing, the batch (pure numpy).

Trajectories that do not vote count in no baseline and no denominator, and get exactly 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from learner.advantages.groups import dr_grpo_advantages
from learner.advantages.outcomes import Float64, Outcomes, contested, same

Baseline = Literal["none", "batch", "group"]
"""What REINFORCE subtracts: nothing, the mean of all voters of the batch, or the mean of the group."""


def reinforce_advantages(outcomes: Outcomes, *, baseline: Baseline = "none") -> Float64:
    """[n] float64: r - baseline (REINFORCE, Williams 1992).

    none   r itself, also for a group of one; where rewards become returns and are whitened over tokens, it is the
           outcome of REINFORCE++ (arXiv 2501.03262)
    batch  r - mean of all voters; exactly 0 when they all have one reward but for rounding, or there is only one
    group  r - mean of the group (`dr_grpo_advantages`); 0 for a group of one or of equal rewards
    """
    if baseline == "group":
        return dr_grpo_advantages(outcomes)
    rewards, votes = outcomes.rewards, outcomes.votes
    if baseline == "none":
        return np.where(votes, rewards, 0.0)
    voting = rewards[votes]
    if len(voting) < 2 or same(voting):
        return np.zeros(len(rewards))
    return np.where(votes, rewards - voting.mean(), 0.0)


def gpg_advantages(
    outcomes: Outcomes, *, nonzero: Literal["rewards", "advantages"] = "rewards", norm: float = 1.0
) -> Float64:
    """[n] float64: alpha * (r - mean of the group) / norm (GPG, arXiv 2504.02546).

    alpha = voters of the batch / those of them that are not 0, which makes up for trajectories without a gradient: it
    spans the batch. nonzero="rewards" counts rewards that are not 0, as verl does; "advantages" counts the
    trajectories of groups whose rewards differ, which is what the paper derives (B / (B - M), M samples of groups that
    are all right or all wrong). Alpha is voters / 1 when none is counted. One voter or equal rewards: 0; verl leaves
    alpha * reward for a group of one.
    """
    centred = dr_grpo_advantages(outcomes)
    voting = outcomes.rewards[outcomes.votes]
    if nonzero == "rewards":
        counted = int(np.count_nonzero(voting))
    else:
        counted = sum(len(members) for members in contested(outcomes))
    return centred * (len(voting) / max(counted, 1)) / norm
