"""Packing: nothing lost, nothing too wide, rows level."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.packing import cut_rows, pack_rows

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 120))
def test_every_trajectory_is_in_one_row_and_no_row_is_wider_than_it_may_be(lengths: list[int], capacity: int) -> None:
    rows = pack_rows(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= capacity for row in rows)
    widths = [sum(lengths[i] for i in row) for row in rows]
    assert widths == sorted(widths, reverse=True)
    if lengths and capacity >= max(lengths):
        assert len(rows) <= 2 * sum(lengths) / capacity + 1, "at most one row may be less than half full"


def test_rows_are_level_instead_of_full_with_a_rest() -> None:
    lengths = [10] * 21
    widths = [sum(lengths[i] for i in row) for row in pack_rows(lengths, 100)]
    assert widths == [70, 70, 70], "not 100, 100, 10"


def test_skewed_lengths_fill_their_micro_batches() -> None:
    rng = np.random.default_rng(0)
    for count in (32, 128, 512):
        lengths = np.minimum(np.exp(6.2 + 0.8 * rng.standard_normal(count)).astype(int), 4096).tolist()
        widths = [sum(lengths[i] for i in row) for row in pack_rows(lengths, 8192)]
        room = sum(widths[cut[0]] * len(cut) for cut in cut_rows(widths, 16384))
        assert sum(lengths) / room > 0.98
