"""The critic's loss against a slow loop and manual values; explained variance from sums over parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from learner.algorithms.losses.value import VarianceSums, explained_variance, value_loss, variance_sums

ROWS = st.lists(
    st.tuples(st.floats(-4, 4), st.floats(-4, 4), st.floats(-30, 30), st.booleans()), min_size=1, max_size=12
)


@pytest.mark.parametrize("clip", [None, 0.5])
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_the_value_loss_is_that_of_a_slow_loop(clip, rows):
    expected, gradients, flags = [], [], []
    for v, old, target, kept in rows:
        leaf = torch.tensor(v, dtype=torch.float64, requires_grad=True)
        loss, flag = 0.5 * (leaf - target) ** 2, False
        assume(clip is None or v not in (old - clip, old + clip))  # torch 2.14 gives half of the gradient at a bound
        if clip is not None and not old - clip <= v <= old + clip:
            bounded = torch.tensor(min(max(v, old - clip), old + clip), dtype=torch.float64)
            other = 0.5 * (bounded - target) ** 2
            assume(other.item() != loss.item())  # there the maximum has no one gradient
            flag = other.item() > loss.item()
            loss = other if flag else loss
        gradient = torch.autograd.grad(loss, leaf)[0].item() if loss.requires_grad else 0.0
        expected.append(loss.item() if kept else 0.0)
        gradients.append(gradient if kept else 0.0)
        flags.append(flag and kept)
    columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*(r[:3] for r in rows), strict=True)]
    mask = torch.tensor([r[3] for r in rows])
    for column, junk in zip(columns, (math.nan, math.inf, -math.inf), strict=True):
        column[~mask] = junk
    values = columns[0].requires_grad_()
    out = value_loss(*columns, mask, clip=clip)
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss.tolist(), expected)
    torch.testing.assert_close(values.grad.tolist(), gradients)
    assert out.clipped.tolist() == flags


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, False),
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, 0.0, True),  # moved 1 towards the target, 0.5 counts
        (0.0, 1.0, 3.0, 4.5, -3.0, False),  # moved away: the whole error counts
        (1.4, 1.0, 1.4, 0.0, 0.0, False),
    ],
)
def test_the_value_loss_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    out = value_loss(values, *torch.tensor([[old], [target]], dtype=torch.float64), torch.tensor([True]), clip=0.5)
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert out.clipped.item() is clipped


def test_a_fully_masked_micro_batch_gives_zero_with_a_graph():
    values = torch.full((2,), math.nan, requires_grad=True)
    junk, mask = torch.full((2,), math.inf), torch.zeros(2, dtype=torch.bool)
    out = value_loss(values, junk, junk, mask, clip=0.5)
    out.loss.sum().backward()
    assert out.loss.tolist() == [0.0, 0.0]
    assert values.grad.tolist() == [0.0, 0.0]


def test_old_values_and_returns_are_constants():
    values, old, returns = (torch.tensor([x], requires_grad=True) for x in (1.0, 0.9, 3.0))
    value_loss(values, old, returns, torch.tensor([True]), clip=0.5).loss.sum().backward()
    assert old.grad is None
    assert returns.grad is None
    with pytest.raises(TypeError, match=r"torch\.bool"):
        value_loss(values, old, returns, torch.tensor([1]))


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 12))
def test_explained_variance_from_parts_is_that_of_the_whole(rows, cut):
    values, returns = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in (0, 2))
    mask = torch.tensor([r[3] for r in rows])
    kept_values, kept = values[mask], returns[mask]
    values[~mask], returns[~mask] = math.nan, math.inf
    parts = [variance_sums(values[s], returns[s], mask[s]) for s in (slice(cut), slice(cut, None))]
    found = explained_variance(VarianceSums(*(a + b for a, b in zip(*parts, strict=True))))
    if len(kept) == 0 or kept.var(unbiased=False) < 1e-6:
        assert math.isfinite(found)
        return
    expected = 1 - ((kept - kept_values).var(unbiased=False) / kept.var(unbiased=False)).item()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.ones(4, dtype=torch.bool)
    assert explained_variance(variance_sums(returns, returns, mask)) == 1.0
    assert explained_variance(variance_sums(torch.full((4,), 7.0), returns, mask)) == pytest.approx(0)
    assert explained_variance(variance_sums(-returns, returns, mask)) == pytest.approx(-3)
    assert explained_variance(variance_sums(returns, torch.full((4,), 0.1), mask)) == 0.0
    assert explained_variance(variance_sums(returns, returns, ~mask)) == 0.0
