"""Packing: nothing lost, nothing too wide, rows level, ranks equally busy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.packing import Layout, cost, cut_rows, layouts, pack_rows, partition

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


def busy(layout: Layout, lengths: list[int]) -> int:
    """Cost of a rank's micro-batches, padding included."""
    widths = [len(m) * max(sum(lengths[i] for i in row) for row in m) for m in layout]
    return cost(sum(widths), sum(lengths[i] ** 2 for m in layout for row in m for i in row))


def dealt(lengths: list[int], ranks: int, capacity: int, budget: int) -> list[Layout]:
    """What `layouts` replaces: micro-batches of the whole part, dealt to the rank with the fewest, then least slots."""
    rows = pack_rows(lengths, capacity)
    cuts = [[rows[r] for r in cut] for cut in cut_rows([sum(lengths[i] for i in row) for row in rows], budget)]
    sizes = [len(m) * max(sum(lengths[i] for i in row) for row in m) for m in cuts]
    hands: list[Layout] = [[] for _ in range(ranks)]
    spent = [0] * ranks
    for i in sorted(range(len(cuts)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (len(hands[r]), spent[r], r))
        hands[rank].append(cuts[i])
        spent[rank] += sizes[i]
    return hands


def search_r1_lengths(number: int) -> list[int]:
    """One minibatch of the Search-R1 presets: 256 trajectories of about 1,800 tokens, up to the maximum of 8,192."""
    draw = np.random.default_rng(number).standard_normal(256)
    return np.minimum(np.exp(7.2 + 0.7 * draw).astype(int) + 200, 8192).tolist()


@pytest.mark.parametrize(("ranks", "was"), [(2, 0.01), (4, 0.04), (8, 0.08)])
def test_ranks_are_idle_for_less_than_one_percent_of_a_step(ranks: int, was: float) -> None:
    """A step of the presets has ten updates, and every update waits for its busiest rank."""
    idle = {}
    for name, found in (("before", dealt), ("after", layouts)):
        steps = [search_r1_lengths(number) for number in range(10)]
        loads = np.array([[busy(x, lengths) for x in found(lengths, ranks, 8192, 16384)] for lengths in steps])
        idle[name] = 1 - loads.mean(1).sum() / loads.max(1).sum()
        ratios = loads.max(1) / loads.mean(1)
        print(f"{ranks} ranks {name}: idle {idle[name]:.2%}, busiest / mean of an update at most {ratios.max():.4f}")
    assert idle["after"] <= 0.01
    assert idle["before"] > was, "the lengths are uneven enough to show it"


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 6), st.sampled_from([0, 60, 100]), st.integers(1, 200))
def test_ranks_share_everything_in_equally_many_micro_batches(
    lengths: list[int], ranks: int, capacity: int, budget: int
) -> None:
    found = layouts(lengths, ranks, capacity, budget)
    assert sorted(i for layout in found for m in layout for row in m for i in row) == list(range(len(lengths)))
    count = max(len(layout) for layout in found)
    for layout in found:
        assert len(layout) == count or all(len(m) == 1 and len(m[0]) == 1 for m in layout), "nothing left to divide"
        for m in layout:
            assert len(m) == 1 or len(m) * max(sum(lengths[i] for i in row) for row in m) <= budget
            assert all(row and (len(row) == 1 or sum(lengths[i] for i in row) <= capacity) for row in m)
    assert found == layouts(lengths, ranks, capacity, budget)


def test_parts_have_nearly_equal_sums() -> None:
    values = [9, 1, 1, 1, 8, 7, 2, 3]
    assert sorted(sum(values[i] for i in part) for part in partition(values, 2)) == [16, 16]
    assert partition([5, 3], 1) == [[0, 1]]
    assert partition([], 2) == [[], []]
    assert sorted(map(sorted, partition([4], 3))) == [[], [], [0]]
