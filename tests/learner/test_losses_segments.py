"""Sums over trajectories against a slow loop: any numbers of trajectories, holes, NaN in the holes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.losses.segments import segment_count, segment_max, segment_mean, segment_sum

SPANS = st.lists(
    st.tuples(st.integers(-(2**62), 2**62), st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1)),
    unique_by=lambda span: span[0],
    max_size=5,
)


def flat(spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = [(x if kept else math.nan, number, kept) for number, span in spans for x, kept in span]
    values, numbers, mask = zip(*tokens, strict=True) if tokens else ((), (), ())
    return (
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
    )


@settings(max_examples=60, deadline=None)
@given(SPANS)
def test_each_token_gets_the_sum_mean_and_maximum_of_its_trajectory(spans):
    values, trajectory, mask = flat(spans)
    sums, means, largest, counts = [], [], [], []
    for _, span in spans:
        kept = [x for x, keep in span if keep]
        for _, keep in span:
            sums.append(sum(kept) if keep else 0.0)
            means.append(sum(kept) / len(kept) if keep else 0.0)
            largest.append(max(kept) if keep else 0.0)
            counts.append(float(len(kept)) if keep else 0.0)
    for found, expected in (
        (segment_sum(values, trajectory, mask), sums),
        (segment_mean(values, trajectory, mask), means),
        (segment_max(values, trajectory, mask), largest),
        (segment_count(trajectory, mask), counts),
    ):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(SPANS)
def test_the_gradient_of_a_mean_is_the_means_of_what_comes_back(spans):
    values, trajectory, mask = flat(spans)
    values.requires_grad_()
    back = torch.arange(1.0, len(values) + 1, dtype=torch.float64)
    (segment_mean(values, trajectory, mask) * back).sum().backward()
    expected, at = [], 1
    for _, span in spans:
        came = [at + i for i, (_, keep) in enumerate(span) if keep]
        expected += [sum(came) / len(came) if keep else 0.0 for _, keep in span]
        at += len(span)
    torch.testing.assert_close(values.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_dummy_that_bears_the_number_of_a_real_trajectory_adds_nothing():
    values, trajectory = torch.tensor([1.0, 2.0, 40.0]), torch.tensor([0, 0, 0])
    mask = torch.tensor([True, True, False])
    assert segment_sum(values, trajectory, mask).tolist() == [3.0, 3.0, 0.0]
    assert segment_mean(values, trajectory, mask).tolist() == [1.5, 1.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays(dtype):
    values, trajectory = torch.ones(3, dtype=dtype), torch.tensor([5, 5, -1])
    for function in (segment_sum, segment_mean, segment_max):
        assert function(values, trajectory, torch.tensor([True, True, True])).dtype == dtype


@pytest.mark.parametrize("function", [segment_sum, segment_mean, segment_max])
def test_a_mask_of_numbers_is_refused(function):
    with pytest.raises(TypeError, match=r"torch\.bool"):
        function(torch.ones(2), torch.tensor([0, 0]), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="shape"):
        function(torch.ones(2, 1), torch.tensor([0, 0]), torch.tensor([True, False]))
