"""Rewards before they become advantages: length (pure numpy, float64). Filter groups on the raw ones."""

from __future__ import annotations

import numpy as np

from learner.advantages.outcomes import Float64, Int64


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
