"""Rewards before they become advantages: length, cost, scale (pure numpy, float64). Filter groups on the raw ones."""

from __future__ import annotations

import numpy as np

from learner.advantages.outcomes import Float64, Int64, Outcomes, same, voters_by_group


def overlong(rewards: Float64, lengths: Int64, *, max_length: int, buffer: int, penalty: float = 1.0) -> Float64:
    """[n] float64: rewards - penalty * excess, the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    rewards [n], lengths [n] in sampled tokens (observations are not the policy's doing; verl counts them). excess is
    0 up to max_length - buffer, grows linearly to 1 at max_length and stays there: AReaL, and verl's DAPO, let it
    grow on. buffer=0 is a step: 1 above max_length. Raises ValueError unless 0 <= buffer <= max_length and
    max_length > 0.
    """
    if not 0 <= buffer <= max_length or max_length <= 0:
        raise ValueError(f"a buffer of {buffer} does not fit into a length of {max_length}")
    over = np.asarray(lengths, np.float64) - (max_length - buffer)
    excess = np.clip(over / buffer, 0.0, 1.0) if buffer else (over > 0).astype(np.float64)
    return np.asarray(rewards, np.float64) - penalty * excess


def cost_shaped(outcomes: Outcomes, costs: Float64, weight: float) -> Float64:
    """[n] float64: r - weight * mean of the group * cost / largest cost of the group's voters.

    costs [n] float64, not negative: sampled tokens, turns or searches (prime-rl's length-shaped GRPO, a call for each
    of its three weights). The better a question is answered, the more a long way counts; a question that nobody
    answers is not made shorter. A group without costs, and who does not vote, keep their rewards. Raises ValueError
    for a negative cost.
    """
    if (np.asarray(costs) < 0).any():
        raise ValueError("a cost is negative")
    out = outcomes.rewards.copy()
    for members in voters_by_group(outcomes):
        largest = costs[members].max()
        if largest > 0:
            out[members] -= weight * outcomes.rewards[members].mean() * costs[members] / largest
    return out


def normalize_rewards(outcomes: Outcomes, *, ddof: int = 1, epsilon: float = 1e-8) -> Float64:
    """[n] float64: (r - mean) / (deviation + epsilon) over all voters of the batch; 0 for who does not vote.

    Fewer than two voters, or one reward but for rounding: 0 for all.
    """
    voting = outcomes.rewards[outcomes.votes]
    if len(voting) < 2 or same(voting):
        return np.zeros(len(outcomes.rewards))
    scaled = (outcomes.rewards - voting.mean()) / (voting.std(ddof=ddof) + epsilon)
    return np.where(outcomes.votes, scaled, 0.0)
