"""Trajectories into rows, rows into micro-batches, micro-batches onto ranks (pure, deterministic; trajectories are not
split).

Also aggregates token losses by a weight per token: the loss of a batch is sum_i weight_i * loss_i. Every denominator is
taken over the whole batch before it is divided, so the gradient does not depend on packing, micro-batches or the number
of ranks. (Other frameworks divide by the counts of the micro-batch or rank, and may scale back. If the engine averages
over ranks and accumulation steps, the caller undoes that average.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

LEVELLING = 6
"""Attempts to find a smaller width with as many rows (bisection)."""


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of `lengths` in rows (first-fit decreasing) of at most `capacity` tokens, longest row first.

    Then the rows are levelled: the smallest width with the same number of rows is used. Otherwise a nearly empty row
    beside full ones would be padded, or would leave one rank idle.

    capacity 0 gives every trajectory its own row; one longer than the capacity gets its own row too.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = _first_fit(lengths, order, capacity)
    if lengths and capacity >= max(lengths):
        # lower bounds on the width
        low, high = max(max(lengths), -(-sum(lengths) // len(rows))), max(sum(lengths[i] for i in row) for row in rows)
        for _ in range(LEVELLING):
            if low >= high:
                break
            middle = (low + high) // 2
            tried = _first_fit(lengths, order, middle)
            if len(tried) <= len(rows):
                rows, high = tried, middle
            else:
                low = middle + 1
    return sorted(rows, key=lambda row: (-sum(lengths[i] for i in row), row))


def _first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free = np.zeros(len(order), np.int64)
    for i in order:
        fits = free[: len(rows)] >= lengths[i]
        place = int(fits.argmax()) if fits.any() else len(rows)
        if place == len(rows):
            rows.append([])
            free[place] = capacity
        rows[place].append(i)
        free[place] -= lengths[i]
    return rows


def cut_rows(widths: Sequence[int], budget: int) -> list[list[int]]:
    """Return micro-batches of row indices (longest first), each with at most `budget` padded tokens or one row."""
    cuts: list[list[int]] = []
    for i, width in enumerate(widths):
        if cuts and widths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= budget:
            cuts[-1].append(i)
        else:
            cuts.append([i] if width else [])
    return [cut for cut in cuts if cut]


def partition_balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of `costs` per rank: the costliest goes to the rank with the fewest items, then the least
    cost.

    Every rank gets the same number of items or one less, since all take part in every collective.
    """
    of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    spent = [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (len(of_ranks[r]), spent[r], r))
        of_ranks[rank].append(i)
        spent[rank] += costs[i]
    return of_ranks


Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def trajectory_weights(counts: Sequence[int], mode: Aggregation, length: int = 0) -> npt.NDArray[np.float64]:
    """Return [n] float64: the weight of each token of trajectory i, which has counts[i] trained tokens.

    token_mean               1 / sum(counts)             (DAPO, arXiv 2503.14476; every token counts the same)
    token_sum                1
    seq_mean_token_mean      1 / (counts[i] * present)   (GRPO, arXiv 2402.03300; every trajectory counts the same)
    seq_mean_token_sum       1 / present; with a length as below
    seq_mean_token_sum_norm  1 / (length * present)      (Dr. GRPO, arXiv 2503.20783; the length is a constant of the
                             run, e.g. the token budget. verl's default is the padded width: there padding changes the
                             loss)

    present is the number of trajectories with a trained token. The others are ignored and get 0; without any, all
    are 0. Raises ValueError if seq_mean_token_sum_norm has no length, or a count or the length is negative.
    """
    n = np.asarray(counts, np.float64)
    if length < 0 or (n < 0).any():
        raise ValueError("counts and length must not be negative")
    if mode == "seq_mean_token_sum_norm" and not length:
        raise ValueError("seq_mean_token_sum_norm needs a length above 0")
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
