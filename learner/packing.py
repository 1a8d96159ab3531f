"""Trajectories into rows, rows into micro-batches, micro-batches onto ranks (pure, deterministic, nothing is split)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVELLING = 6
"""Attempts to find a smaller width that needs no more rows. Each halves what is left to gain."""


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in rows of at most `capacity` tokens, longest row first.

    The rows are then levelled: the smallest width is looked for that needs as many rows, so that no row is left nearly
    empty beside full ones, where it would be padded, or would keep one rank idle while the others compute.

    capacity 0 gives every trajectory a row of its own; one longer than the capacity gets a row of its own too.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = _first_fit(lengths, order, capacity)
    if lengths and capacity >= max(lengths):
        # no width below these two can do
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
    room = np.zeros(len(order), np.int64)
    for i in order:
        fits = room[: len(rows)] >= lengths[i]
        place = int(fits.argmax()) if fits.any() else len(rows)
        if place == len(rows):
            rows.append([])
            room[place] = capacity
        rows[place].append(i)
        room[place] -= lengths[i]
    return rows


def cut_rows(widths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows, given longest first, in micro-batches of at most `budget` tokens with padding, or of one row."""
    cuts: list[list[int]] = []
    for i, width in enumerate(widths):
        if cuts and widths[cuts[-1][0]] * (len(cuts[-1]) + 1) <= budget:
            cuts[-1].append(i)
        else:
            cuts.append([i] if width else [])
    return [cut for cut in cuts if cut]


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `costs` for each rank: the costliest goes to the rank with the fewest items, then the least cost.

    Every rank gets the same number of items or one less, since each takes part in every collective.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    spent = [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (len(hands[r]), spent[r], r))
        hands[rank].append(i)
        spent[rank] += costs[i]
    return hands
