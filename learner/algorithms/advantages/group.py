"""Advantages relative to the group or the batch (pure numpy, float64): one number per trajectory.

In all of these an invalid trajectory counts in no baseline, deviation or denominator, and gets exactly 0. A group
whose valid trajectories have equal rewards (up to rounding), and a group with one valid trajectory, get exactly 0:
otherwise rounding divided by a small epsilon would be trained on. The order of trajectories does not matter; groups
may be interleaved and of any size.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from learner.algorithms.advantages.outcomes import SAME, Bool, Float64, Outcomes, contested, same, tolerance

Spread = Literal["group", "batch", "none"]
"""What centred rewards are divided by: the deviation of their group, that of all valid trajectories of the batch, or
nothing."""


def grpo_advantages(outcomes: Outcomes, *, std: Spread = "group", ddof: int = 1, epsilon: float = 1e-6) -> Float64:
    """Return [n] float64: (r - mean of the group) / (deviation + epsilon) (GRPO, arXiv 2402.03300, section 4.1.2).

    std="group" takes the deviation of the group, "batch" that of all valid rewards of the batch (TRL's
    `scale_rewards="batch"`, arXiv 2508.08221), "none" does not divide (Dr. GRPO). ddof=1 divides the variance by
    n - 1, as verl, TRL, OpenRLHF, slime and AReaL do; epsilon is 1e-6 in verl and slime, 1e-4 in TRL, 1e-9 in
    OpenRLHF, 1e-5 in AReaL.

    A group with one valid trajectory gets 0, as in TRL; verl and Search-R1 set mean 0 and deviation 1 there, which
    trains on the raw reward; OpenRLHF refuses. A group of equal rewards gets exactly 0.
    """
    out = np.zeros(len(outcomes.rewards))
    voting = outcomes.rewards[outcomes.valid]
    for members in contested(outcomes):
        rewards = outcomes.rewards[members]
        centred = rewards - rewards.mean()
        if std == "none":
            out[members] = centred
        else:
            out[members] = centred / ((rewards if std == "group" else voting).std(ddof=ddof) + epsilon)
    return out


def dr_grpo_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: r - mean of the group (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Use it with a loss whose denominator is a constant (`seq_mean_token_sum_norm`); otherwise the bias towards long
    wrong answers returns. It is also REINFORCE with the group's mean as baseline, and prime-rl's default. One valid
    trajectory or equal rewards: 0.
    """
    return grpo_advantages(outcomes, std="none")


def rloo_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: r - mean of the others in the group (RLOO, arXiv 2402.14740, equation 8).

    One valid trajectory: 0, as in verl's `rloo_vectorized`; its `rloo` leaves the raw reward. Equal rewards: 0.
    """
    out = np.zeros(len(outcomes.rewards))
    for members in contested(outcomes):
        rewards = outcomes.rewards[members]
        out[members] = (rewards - rewards.mean()) * (len(members) / (len(members) - 1))
    return out


def reinforce_pp_baseline_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: r - mean of the group, to be whitened over all tokens of the batch (`whiten`).

    REINFORCE++ with a group baseline (arXiv 2501.03262): whitening is over tokens, so its moments are dominated by
    long answers. One valid trajectory or equal rewards: 0 before the whitening, which may shift it; verl leaves the raw
    reward of a single valid trajectory.
    """
    return grpo_advantages(outcomes, std="none")


def opo_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: r - sum(length * r) / sum(length) over the group (OPO, arXiv 2505.23585).

    The baseline of least variance when the gradient's norm grows with the length; lengths are sampled tokens. A group
    without a sampled token takes the plain mean. One valid trajectory or equal rewards: 0 (verl leaves the raw reward
    of one).
    """
    out = np.zeros(len(outcomes.rewards))
    for members in contested(outcomes):
        rewards, lengths = outcomes.rewards[members], outcomes.lengths[members].astype(np.float64)
        weights = lengths if lengths.sum() > 0 else np.ones_like(lengths)
        out[members] = rewards - (weights * rewards).sum() / weights.sum()
    return out


def normalized_batch(advantages: Float64, valid: Bool, *, ddof: int = 1, epsilon: float = 1e-6) -> Float64:
    """Return [n] float64: (a - mean) / (deviation + epsilon) over the valid trajectories of the batch; 0 for the
    others.

    The last step of GDPO (arXiv 2601.05242), there and in TRL (epsilon 1e-4) over trajectories. One valid trajectory,
    or advantages [n] that are equal up to rounding: 0. A mean of 0 up to rounding is taken as 0, so that an advantage
    of exactly 0 (a group without a learning signal) stays 0 where the advantages of groups are centred.
    """
    out = np.zeros(len(advantages))
    voting = advantages[valid]
    if len(voting) > 1 and not same(voting):
        mean = voting.mean()
        if abs(mean) <= SAME * np.abs(voting).max():
            mean = 0.0
        out[valid] = (voting - mean) / (voting.std(ddof=ddof) + epsilon)
    return out


def max_rl_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: (r - mean) / mean of the group, 0 where the mean is not above 0 (MaxRL, as prime-rl has it).

    With rewards of 0 and 1 it ascends the log-likelihood of being right; a mean near 0 makes it large (n - 1 for one
    right of n). One valid trajectory or equal rewards: 0.
    """
    out = np.zeros(len(outcomes.rewards))
    for members in contested(outcomes):
        rewards = outcomes.rewards[members]
        mean = rewards.mean()
        if mean > tolerance(rewards):
            out[members] = (rewards - mean) / mean
    return out


def pass_at_k_advantages(
    outcomes: Outcomes, *, epsilon: float = 1e-6, ddof: int = 1, normalize_std: bool = True
) -> Float64:
    """Return [n] float64: (best - second) / (deviation of the group + epsilon) for the best of each group, 0 for all
    others.

    Leave-one-out of the maximum (arXiv 2503.19595): only the trajectory whose absence would lower the best of k is
    credited. If two share the best reward (up to rounding), all get 0. One valid trajectory: 0; verl refuses it.
    normalize_std=False omits the division.
    """
    out = np.zeros(len(outcomes.rewards))
    for members in contested(outcomes):
        rewards = outcomes.rewards[members]
        second, best = np.sort(rewards)[-2:]
        if best - second > tolerance(rewards):
            scale = rewards.std(ddof=ddof) + epsilon if normalize_std else 1.0
            out[members[rewards.argmax()]] = (best - second) / scale
    return out


Baseline = Literal["none", "batch", "group"]
"""What REINFORCE subtracts: nothing, the mean of all valid trajectories of the batch, or the mean of the group."""


def reinforce_advantages(outcomes: Outcomes, *, baseline: Baseline = "none") -> Float64:
    """Return [n] float64: r - baseline (REINFORCE, Williams 1992).

    none   r itself, also for a group of one; with returns whitened over tokens it is the
           outcome of REINFORCE++ (arXiv 2501.03262)
    batch  r - mean of all valid trajectories; exactly 0 if their rewards are equal up to rounding, or there is only one
    group  r - mean of the group (`dr_grpo_advantages`); 0 for a group of one or of equal rewards
    """
    if baseline == "group":
        return dr_grpo_advantages(outcomes)
    rewards, valid = outcomes.rewards, outcomes.valid
    if baseline == "none":
        return np.where(valid, rewards, 0.0)
    voting = rewards[valid]
    if len(voting) < 2 or same(voting):
        return np.zeros(len(rewards))
    return np.where(valid, rewards - voting.mean(), 0.0)


def gpg_advantages(outcomes: Outcomes) -> Float64:
    """Return [n] float64: alpha * (r - mean of the group) (GPG, arXiv 2504.02546).

    alpha = valid trajectories of the batch / those in groups whose rewards differ, as the paper derives (B / (B - M), M
    samples of groups that are all right or all wrong; verl counts rewards that are not 0). It compensates for
    trajectories without a gradient, over the whole batch. If none is counted, the denominator is 1. One valid
    trajectory or equal rewards: 0; verl leaves alpha * reward for a group of one.
    """
    counted = sum(len(members) for members in contested(outcomes))
    return dr_grpo_advantages(outcomes) * (np.count_nonzero(outcomes.valid) / max(counted, 1))
