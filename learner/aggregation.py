"""How token losses become one number, as a weight for each token (pure numpy).

The loss of a batch is sum_i weight_i * loss_i. Every denominator is taken over the whole batch before it is cut, so
the gradient does not depend on how the batch is packed, split into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def trajectory_weights(counts: Sequence[int], mode: Aggregation, length: int = 0) -> npt.NDArray[np.float64]:
    """[n] float64: the weight of each token of trajectory i, which has counts[i] trained tokens.

    token_mean           1 / sum(counts)                     (DAPO, arXiv 2503.14476)
    seq_mean_token_mean  1 / (counts[i] * trajectories)      (GRPO, arXiv 2402.03300)
    seq_mean_token_sum   1 / (max(length, 1) * trajectories) (Dr. GRPO, arXiv 2503.20783, with a constant length)

    Only trajectories with a trained token count; the others get 0.
    """
    n = np.asarray(counts, np.float64)
    present = n > 0
    tokens, trajectories = n.sum(), present.sum()
    if not trajectories:
        return np.zeros_like(n)
    if mode == "token_mean":
        weight = np.full_like(n, 1.0 / tokens)
    elif mode == "seq_mean_token_mean":
        weight = 1.0 / (np.maximum(n, 1.0) * trajectories)
    else:
        weight = np.full_like(n, 1.0 / (max(length, 1) * trajectories))
    return np.where(present, weight, 0.0)
