"""Sequences onto ranks, into rows, and rows into micro-batches (pure, deterministic; a sequence is not split).

A trajectory is one sequence, or several that may lie in different micro-batches (`Trajectory.sequences`).

Also aggregates token losses by a weight per token: the loss of a batch is sum_i weight_i * loss_i. Every denominator is
taken over the whole batch before it is divided, so the gradient does not depend on packing, micro-batches or the number
of ranks. (Other frameworks divide by the counts of the micro-batch or rank, and may scale back. If the engine averages
over ranks and accumulation steps, the caller undoes that average.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

LEVELLING = 6
"""Attempts to find a smaller width with as many rows (bisection)."""
ATTENTION_TOKENS = 24_576
"""Length at which attention costs as much as all other layers: 12 * hidden size, here that of Qwen2.5-3B. A layer takes
24 * hidden^2 operations per token, and attention 2 * hidden * length^2 (causal)."""


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


def cost(tokens: int, squares: int) -> int:
    """Return the compute of a micro-batch with `tokens` (padding included) and sum(length^2) `squares`, in units of
    1 / ATTENTION_TOKENS of a token without attention.
    """
    return tokens * ATTENTION_TOKENS + squares


def partition(values: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of `values` in `parts` lists with nearly equal sums.

    Largest differencing method (Karmarkar and Karp, 1982): the two partial partitions with the largest differences are
    merged, the largest sums of one with the smallest of the other. Few values per list stay more even than with
    longest-processing-time first.
    """
    heap = [(-value, i, [(value, [i]), *[(0, [])] * (parts - 1)]) for i, value in enumerate(values)]
    if not heap or parts == 1:
        return [list(range(len(values))), *[[] for _ in range(parts - 1)]]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, i, left), (_, j, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(((a + b, p + q) for (a, p), (b, q) in zip(left, reversed(right), strict=True)), reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(i, j), merged))
    return [sorted(members) for _, members in heap[0][2]]


Layout = list[list[list[int]]]
"""Micro-batches of rows of indices."""


def layouts(lengths: Sequence[int], ranks: int, capacity: int, budget: int) -> list[Layout]:
    """Return each rank's micro-batches: at most `budget` padded tokens, in rows of at most `capacity` (`pack_rows`).

    All ranks take part in every collective, so they get equally many micro-batches, the costliest first. A rank has
    fewer only if it has fewer trajectories than that. The ranks' trajectories have nearly equal cost, and their rows
    nearly equal widths: otherwise padding would undo the balance.
    """
    squares = [n * n for n in lengths]
    members = partition([cost(n, square) for n, square in zip(lengths, squares, strict=True)], ranks)
    packed = [pack_rows([lengths[i] for i in own], capacity) for own in members]
    most = max(len(rows) for rows in packed)
    found: list[Layout] = []
    for own, rows in zip(members, packed, strict=True):
        if capacity and ranks > 1:
            rows = _level([lengths[i] for i in own], most, capacity) or rows
        widths = [sum(lengths[own[i]] for i in row) for row in rows]
        found.append([[[own[i] for i in rows[r]] for r in cut] for cut in cut_rows(widths, budget)])
    count = max(len(layout) for layout in found)
    return [_divided(layout, count, lengths) if ranks > 1 else layout for layout in found]


def _level(lengths: Sequence[int], count: int, capacity: int) -> list[list[int]]:
    """Return the indices in `count` rows of nearly equal width, widest first; [] if one would exceed `capacity`."""
    rows = [row for row in partition(lengths, count) if row]
    widest_first = sorted((-sum(lengths[i] for i in row), row) for row in rows)
    fits = all(-width <= capacity or len(row) == 1 for width, row in widest_first)
    return [row for _, row in widest_first] if fits else []


def _divided(layout: Layout, count: int, lengths: Sequence[int]) -> Layout:
    """Return the layout with its largest micro-batches divided until there are `count`, or none can be divided;
    costliest first.
    """
    layout = list(layout)
    while len(layout) < count:
        divisible = [m for m in layout if len(m) > 1 or len(m[0]) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda m: (_tokens(m, lengths), m))
        if len(largest) > 1:
            half = (len(largest) + 1) // 2
            halves = [largest[:half], largest[half:]]
        else:
            row = largest[0]
            halves = [[[row[i] for i in part]] for part in partition([lengths[i] for i in row], 2)]
        layout.remove(largest)
        layout += halves
    return sorted(layout, key=lambda m: (-_cost_of(m, lengths), m))


def _tokens(micro_batch: list[list[int]], lengths: Sequence[int]) -> int:
    return len(micro_batch) * max(sum(lengths[i] for i in row) for row in micro_batch)


def _cost_of(micro_batch: list[list[int]], lengths: Sequence[int]) -> int:
    return cost(_tokens(micro_batch, lengths), sum(lengths[i] ** 2 for row in micro_batch for i in row))


class PlacedRows(NamedTuple):
    """Rows as arrays: ids, positions, document_ids [R, L] int64 as in `learner.data.batch.MicroBatch`, and `starts`,
    where each trajectory begins in the flattened rows."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int64]
    starts: list[int]


def place_rows(rows: Sequence[Sequence[npt.NDArray[np.int64]]]) -> PlacedRows:
    """Return the trajectories of each row one after the other, padded at the end to the width of the longest row.

    Positions of padding are 0: some models rotate by the largest position of a call.
    """
    width = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), width)
    ids, positions, document_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    starts = []
    for y, row in enumerate(rows):
        x = 0
        for document, part in enumerate(row):
            n = len(part)
            ids[y, x : x + n] = part
            positions[y, x : x + n] = np.arange(n)
            document_ids[y, x : x + n] = document
            starts.append(y * width + x)
            x += n
    return PlacedRows(ids, positions, document_ids, starts)


def holds_several(document_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> bool:
    """Return whether a row has several trajectories: several documents, or one whose positions go back."""
    back = (np.diff(positions) != 1) & (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    return bool((document_ids > 0).any() or back.any())


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
