"""Weights of tokens against the aggregations written as loops over trajectories."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.packing import Aggregation, trajectory_weights

MODES = get_args(Aggregation)
LENGTH = 50


def slow(losses, mode):
    """The aggregate of the losses of each trajectory's trained tokens, as its definition says it."""
    present = [row for row in losses if row]
    if not present:
        return 0.0
    total = math.fsum(x for row in present for x in row)
    if mode == "token_sum":
        return total
    if mode == "token_mean":
        return total / sum(len(row) for row in present)
    if mode == "seq_mean_token_mean":
        return math.fsum(math.fsum(row) / len(row) for row in present) / len(present)
    return math.fsum(math.fsum(row) / LENGTH for row in present) / len(present)


ragged = st.lists(st.lists(st.floats(-5, 5), max_size=7), max_size=6)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(ragged)
def test_weighted_losses_add_up_to_the_aggregate(mode, losses):
    weights = trajectory_weights([len(row) for row in losses], mode, LENGTH)
    found = math.fsum(w * x for w, row in zip(weights, losses, strict=True) for x in row)
    assert found == pytest.approx(slow(losses, mode), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 4))
def test_a_trajectory_without_a_trained_token_counts_nowhere(mode, counts, empty):
    weights = trajectory_weights([*counts, *[0] * empty], mode, LENGTH)
    assert weights[: len(counts)].tolist() == trajectory_weights(counts, mode, LENGTH).tolist()
    assert (weights[len(counts) :] == 0).all()
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("mode", MODES)
def test_weights_follow_their_trajectory_in_any_order(mode):
    counts, order = [3, 0, 5, 1], [2, 3, 1, 0]
    moved = trajectory_weights([counts[i] for i in order], mode, LENGTH)
    assert moved.tolist() == trajectory_weights(counts, mode, LENGTH)[order].tolist()


def test_each_mode_by_hand():
    counts = [4, 1, 0]
    assert trajectory_weights(counts, "token_mean").tolist() == [0.2, 0.2, 0]
    assert trajectory_weights(counts, "token_sum").tolist() == [1, 1, 0]
    assert trajectory_weights(counts, "seq_mean_token_mean").tolist() == [1 / 8, 1 / 2, 0]
    assert trajectory_weights(counts, "seq_mean_token_sum").tolist() == [1 / 2, 1 / 2, 0]
    assert trajectory_weights(counts, "seq_mean_token_sum", 100).tolist() == [1 / 200, 1 / 200, 0]
    assert trajectory_weights(counts, "seq_mean_token_sum_norm", 100).tolist() == [1 / 200, 1 / 200, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_trained_tokens_has_weights_of_zero(mode):
    assert trajectory_weights([0, 0], mode, LENGTH).tolist() == [0.0, 0.0]
    assert trajectory_weights([], mode, LENGTH).shape == (0,)


def test_a_length_that_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="needs a length"):
        trajectory_weights([1], "seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="negative"):
        trajectory_weights([1], "seq_mean_token_sum", -1)
    with pytest.raises(ValueError, match="negative"):
        trajectory_weights([-1], "token_mean")
