"""How token losses become one number, as a weight for each token (pure numpy).

The loss of a batch is sum_i weight_i * loss_i. Every denominator is taken over the whole batch before it is cut, so
the gradient does not depend on how the batch is packed, split into micro-batches or spread over ranks. (Peers divide by
counts of the micro-batch or rank and scale back, or not; with an engine that averages over ranks and accumulation
steps, the caller undoes that average.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def trajectory_weights(counts: Sequence[int], mode: Aggregation, length: int = 0) -> npt.NDArray[np.float64]:
    """[n] float64: the weight of each token of trajectory i, which has counts[i] trained tokens.

    token_mean               1 / sum(counts)             (DAPO, arXiv 2503.14476; every token the same)
    token_sum                1
    seq_mean_token_mean      1 / (counts[i] * present)   (GRPO, arXiv 2402.03300; every trajectory the same)
    seq_mean_token_sum       1 / present; with a length as below
    seq_mean_token_sum_norm  1 / (length * present)      (Dr. GRPO, arXiv 2503.20783; the length is a constant of the
                             run, e.g. the token budget. verl's default is the padded width: padding moves the loss)

    present is the number of trajectories with a trained token. The others count nowhere and get 0; without any, all
    are 0. Raises ValueError for seq_mean_token_sum_norm without a length, and for a negative count or length.
    """
    n = np.asarray(counts, np.float64)
    if length < 0 or (n < 0).any():
        raise ValueError("a count or the length is negative")
    if mode == "seq_mean_token_sum_norm" and not length:
        raise ValueError("seq_mean_token_sum_norm needs a length")
    present = n > 0
    trajectories = present.sum()
    if not trajectories:
        return np.zeros_like(n)
    if mode == "token_mean":
        weight = np.full_like(n, 1.0 / n.sum())
    elif mode == "token_sum":
        weight = np.ones_like(n)
    elif mode == "seq_mean_token_mean":
        weight = 1.0 / (np.maximum(n, 1.0) * trajectories)
    else:
        weight = np.full_like(n, 1.0 / (max(length, 1) * trajectories))
    return np.where(present, weight, 0.0)
