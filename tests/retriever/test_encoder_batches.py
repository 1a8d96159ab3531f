"""Length buckets: every text once, within the budget, padded by its own length alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retriever.encoder.transformer import LEAST, MULTIPLE, batches, padded_length

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 4000))
def test_every_text_is_in_one_batch_long_enough_for_it(lengths: list[int], budget: int) -> None:
    made = list(batches(lengths, 300, budget))
    assert sorted(position for positions, _ in made for position in positions) == list(range(len(lengths)))
    assert all(lengths[position] <= padded for positions, padded in made for position in positions)


@given(LENGTHS, st.integers(1, 4000))
def test_a_batch_stays_within_the_budget_unless_one_text_is_longer(lengths: list[int], budget: int) -> None:
    assert all(len(positions) * padded <= max(budget, padded) for positions, padded in batches(lengths, 300, budget))


@given(LENGTHS, LENGTHS, st.integers(1, 4000))
def test_padding_does_not_depend_on_the_other_texts(lengths: list[int], others: list[int], budget: int) -> None:
    def padding(of: list[int]) -> dict[int, int]:
        return {position: padded for positions, padded in batches(of, 300, budget) for position in positions}

    alone, together = padding(lengths), padding(lengths + others)
    assert all(together[position] == padded for position, padded in alone.items())


@given(st.integers(1, 600), st.integers(1, 600))
def test_padding_is_small_and_stays_within_the_models_positions(length: int, limit: int) -> None:
    padded = padded_length(length, limit)
    assert length <= padded < max(length + MULTIPLE, LEAST + 1)
    assert padded <= max(limit, length)


def test_the_longest_come_first() -> None:
    assert [padded for _, padded in batches([3, 100, 50], 300, 1000)] == [104, 56, 16]
