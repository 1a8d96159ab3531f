"""Returns, GAE, whitening and rows against slow loops in float64, on masks with holes and gamma, lambda below 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages.gae import discounted_returns, gae, settled_rewards, to_rows
from learner.algorithms.advantages.whitening import whiten

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")
number = st.floats(-3, 3).map(lambda x: round(x, 3))
discount = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def t64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


@st.composite
def rows(draw):
    """(rewards, values, mask, last values): up to 4 rows of up to 9 tokens, with holes, some masked throughout."""
    b, t = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    table = lambda element: draw(  # noqa: E731
        st.lists(st.lists(element, min_size=t, max_size=t), min_size=b, max_size=b)
    )
    return (
        t64(table(number)),
        t64(table(number)),
        mask_of(table(st.booleans())),
        t64(draw(st.lists(number, min_size=b, max_size=b))),
    )


def slow_settled(rewards, mask):
    """Rewards of the tokens where the mask holds, in order, each with what was masked after it (before the first)."""
    out, early = [], 0.0
    for reward, kept in zip(rewards, mask, strict=True):
        if kept:
            out.append(reward + early)
            early = 0.0
        elif out:
            out[-1] += reward
        else:
            early += reward
    return out


def slow_gae(rewards, values, mask, gamma, lam, last):
    """By the sums A_t = sum_l (gamma lam)^l delta_{t+l} over the tokens where the mask holds, and R_t = A_t + V_t."""
    r = slow_settled(rewards, mask)
    v = [x for x, kept in zip(values, mask, strict=True) if kept] + [last]
    delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
    found = [math.fsum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(r))) for i in range(len(r))]
    return spread(found, mask), spread([a + b for a, b in zip(found, v, strict=False)], mask)


def slow_returns(rewards, mask, gamma):
    r = slow_settled(rewards, mask)
    return spread([math.fsum(gamma ** (j - i) * r[j] for j in range(i, len(r))) for i in range(len(r))], mask)


def spread(found, mask):
    left = iter(found)
    return [next(left) if kept else 0.0 for kept in mask]


def test_holes_are_skipped_and_carried_over_by_hand():
    # verl's numbers for the case on which its peers disagree (it carries them through the hole; here that is 0)
    values, mask = t64([[0.5, 0.6, 9, 9, 0.7, 0.8]]), mask_of([[1, 1, 0, 0, 1, 1]])
    rewards = t64([[0, 0, 0, 0, 0, 1]])
    advantages, returns = gae(rewards, values, mask, 0.99, 0.95)
    # the last: 1 - 0.8; before it: 0.99 * 0.8 - 0.7 + 0.9405 * 0.2; across the hole: 0.99 * 0.7 - 0.6 + 0.9405 * that
    np.testing.assert_allclose(advantages[0, 4:], [0.2801, 0.2], rtol=1e-12)
    np.testing.assert_allclose(advantages[0, 1], 0.093 + 0.9405 * 0.2801, rtol=1e-12)
    np.testing.assert_allclose(advantages, [[0.4292, 0.3564, 0, 0, 0.2801, 0.2]], atol=5e-5)
    assert advantages[0, 2:4].tolist() == returns[0, 2:4].tolist() == [0.0, 0.0]
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])


def test_discounted_returns_by_hand():
    found = discounted_returns(t64([[1, 0, 0, 2, 4]]), mask_of([[1, 0, 1, 0, 1]]), 0.5)
    np.testing.assert_allclose(found, [[1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 0, 4]])


@settings(max_examples=200, deadline=None)
@given(rows(), discount, discount)
def test_gae_is_the_sum_of_its_formula(given_, gamma, lam):
    rewards, values, mask, last = given_
    advantages, returns = gae(rewards, values, mask, gamma, lam, last)
    for i in range(len(rewards)):
        slow = slow_gae(*(x[i].tolist() for x in (rewards, values, mask)), gamma, lam, last[i].item())
        np.testing.assert_allclose(advantages[i], slow[0], atol=1e-12)
        np.testing.assert_allclose(returns[i], slow[1], atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(rows(), discount)
def test_returns_are_the_sum_of_their_formula(given_, gamma):
    rewards, values, mask, _ = given_
    found = discounted_returns(rewards, mask, gamma)
    slow = [slow_returns(r, m, gamma) for r, m in zip(rewards.tolist(), mask.tolist(), strict=True)]
    np.testing.assert_allclose(found, slow, atol=1e-12)
    # with lambda 1 GAE telescopes: its returns are these, whatever the critic says
    torch.testing.assert_close(gae(rewards, values, mask, gamma, 1.0)[1], found, atol=1e-12, rtol=0)


@settings(max_examples=100, deadline=None)
@given(rows(), discount, discount)
def test_masked_values_have_no_effect(given_, gamma, lam):
    rewards, values, mask, last = given_
    rewards = torch.where(mask, rewards, 0.0)
    expected = gae(rewards, values, mask, gamma, lam, last)
    for poison in (NAN, INF, -INF):
        bad = gae(torch.where(mask, rewards, poison), torch.where(mask, values, poison), mask, gamma, lam, last)
        assert [x.tolist() for x in bad] == [x.tolist() for x in expected]
        returns = discounted_returns(torch.where(mask, rewards, poison), mask, gamma)
        assert returns.tolist() == discounted_returns(rewards, mask, gamma).tolist()
    assert (expected[0][~mask] == 0).all() and (expected[1][~mask] == 0).all()


@settings(max_examples=100, deadline=None)
@given(rows(), discount, discount)
def test_without_the_holes_the_tokens_get_the_same(given_, gamma, lam):
    rewards, values, mask, last = given_
    held = mask.any(1)
    settled = settled_rewards(rewards, mask)
    trajectory = torch.arange(10, 10 + len(mask))[:, None].expand(mask.shape)[mask]
    flat = to_rows(trajectory)
    assert flat.ids.tolist() == (torch.arange(10, 10 + len(mask))[held]).tolist()
    compact = gae(flat.pad(settled[mask]), flat.pad(values[mask]), flat.mask, gamma, lam, last[held])
    holed = gae(rewards, values, mask, gamma, lam, last)
    for one, other in zip(compact, holed, strict=True):
        torch.testing.assert_close(flat.flat(one), other[mask], atol=1e-12, rtol=0)
    one = discounted_returns(flat.pad(settled[mask]), flat.mask, gamma)
    torch.testing.assert_close(flat.flat(one), discounted_returns(rewards, mask, gamma)[mask], atol=1e-12, rtol=0)


def test_a_cut_off_trajectory_goes_on_with_the_critics_value():
    mask = mask_of([[1, 1, 0]])
    advantages, returns = gae(t64([[0, 0, 0]]), t64([[0.5, 0.25, NAN]]), mask, 0.9, 0.5, t64([2.0]))
    last = 0.9 * 2 - 0.25
    np.testing.assert_allclose(advantages, [[0.9 * 0.25 - 0.5 + 0.45 * last, last, 0]])
    np.testing.assert_allclose(returns[0, 1], 1.8)


def test_a_reward_on_a_masked_token_goes_to_the_token_before_it():
    rewards, mask = t64([[7, 1, 2, 4, 8], [1, 2, 4, 8, 16]]), mask_of([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert settled_rewards(rewards, mask).tolist() == [[0, 10, 0, 12, 0], [0] * 5]
    # cut off right after an observation: verl loses this one
    found, _ = gae(t64([[0, 0, 1]]), t64([[0, 0, 0]]), mask_of([[1, 1, 0]]), 0.5, 1.0)
    assert found.tolist() == [[0.5, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_masked_throughout_and_rows_without_tokens_are_zero(dtype):
    for shape in ((2, 3), (2, 0), (0, 3)):
        nothing, mask = torch.full(shape, NAN, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        found = [*gae(nothing, nothing, mask, 0.9, 0.9), discounted_returns(nothing, mask, 0.9), whiten(nothing, mask)]
        assert all(x.shape == shape and x.dtype == dtype and (x == 0).all() for x in found)


def test_no_gradient_flows_through_advantages():
    rewards, values = (t64([[0.1, 0.2, 0.3]]).requires_grad_() for _ in range(2))
    last, mask = t64([1.0]).requires_grad_(), mask_of([[1, 0, 1]])
    found = [
        *gae(rewards, values, mask, 0.9, 0.9, last),
        discounted_returns(rewards, mask, 0.9),
        whiten(values, mask),
        settled_rewards(rewards, mask),
    ]
    assert not any(x.requires_grad for x in found)


def test_float32_differs_from_float64_by_rounding_only():
    generator = torch.Generator().manual_seed(3)
    r, v = (torch.randn(3, 400, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 400, generator=generator) < 0.7
    for one, other in zip(gae(r, v, mask, 0.99, 0.95), gae(r.float(), v.float(), mask, 0.99, 0.95), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-5)


def slow_whiten(values, mask, unbiased, epsilon, centre_only):
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    if len(kept) < 2 or max(kept) - min(kept) < 1e-9:
        return [0.0] * len(values)
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - unbiased)
    scale = 1.0 if centre_only else math.sqrt(variance + epsilon)
    return [(v - mean) / scale if m else 0.0 for v, m in zip(values, mask, strict=True)]


@settings(max_examples=150, deadline=None)
@given(rows(), st.booleans(), st.sampled_from([0.0, 1e-8, 0.1]), st.booleans())
def test_whitening_is_its_formula(given_, unbiased, epsilon, centre_only):
    _, values, mask, _ = given_
    poisoned = torch.where(mask, values, NAN)
    found = whiten(poisoned, mask, unbiased=unbiased, epsilon=epsilon, centre_only=centre_only)
    slow = slow_whiten(values.flatten().tolist(), mask.flatten().tolist(), unbiased, epsilon, centre_only)
    np.testing.assert_allclose(found.flatten(), slow, atol=1e-9)


def test_whitening_by_hand():
    values, mask = t64([[1, 99, 2], [3, 99, 4]]), mask_of([[1, 0, 1], [1, 0, 1]])
    # mean 2.5, sum of squares 5: variance 5/3 or 5/4
    np.testing.assert_allclose(whiten(values, mask, epsilon=0.0)[0], np.array([-1.5, 0, -0.5]) / math.sqrt(5 / 3))
    np.testing.assert_allclose(whiten(values, mask, epsilon=0.0, unbiased=False)[1, 2], 1.5 / math.sqrt(1.25))
    np.testing.assert_allclose(whiten(values, mask, centre_only=True), [[-1.5, 0, -0.5], [0.5, 0, 1.5]])


def test_the_moments_are_those_of_all_ranks_together():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(30, generator=generator, dtype=torch.float64) * 3 + 5
    mask = torch.rand(30, generator=generator) < 0.6
    whole = whiten(values, mask)
    cut = [slice(0, 4), slice(4, 25), slice(25, 25), slice(25, 30)]  # one rank has nothing
    sums = [torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]

    def listening(round_):
        calls = iter(range(2))

        def total(vector):
            call = next(calls)
            assert vector.dtype == torch.float64
            if call == round_:
                sums[call] += vector
            return sums[call].clone()

        return total, calls

    for round_ in (0, 1, 2):  # what each collective adds up, and then the result
        parts = []
        for place in cut:
            total, calls = listening(round_)
            parts.append(whiten(values[place], mask[place], all_reduce=total))
            assert next(calls, None) is None, "both collectives are joined on every rank"
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    alone = torch.cat([whiten(values[place], mask[place]) for place in cut])
    assert not torch.allclose(alone, whole, atol=1e-2), "moments of a rank alone are others"


RANK = """
import os, sys, torch
import torch.distributed as dist
from learner.algorithms.advantages.whitening import whiten
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["FORAY_STORE"], rank=rank, world_size=2)
values = torch.arange(10, dtype=torch.float64) ** 2
mask = values.long() % 3 != 0
place = slice(0, 4) if rank == 0 else slice(4, 10)

def total(vector):
    dist.all_reduce(vector)
    return vector

found = whiten(values[place], mask[place], all_reduce=total)
torch.testing.assert_close(found, whiten(values, mask)[place], rtol=1e-12, atol=1e-12)
nothing = torch.zeros_like(mask[place]) if rank == 0 else mask[place]
found = whiten(values[place], nothing, all_reduce=total)
torch.testing.assert_close(found, whiten(values[place], nothing), rtol=1e-12, atol=1e-12)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_whiten_as_one(tmp_path, zygote):
    (tmp_path / "rank.py").write_text(RANK)
    zygote.run_ranks(tmp_path / "rank.py", [], tmp_path, 2)


@pytest.mark.parametrize("values", [[5.0], [], [0.1 + 0.2, 0.3, 0.3], [1e8, 1e8], [0.0, 0.0]])
def test_too_few_or_equal_tokens_become_exactly_zero(values):
    mask = torch.ones(len(values), dtype=torch.bool)
    for options in ({}, {"epsilon": 0.0}, {"unbiased": False, "epsilon": 0.0}, {"centre_only": True}):
        assert whiten(t64(values), mask, **options).tolist() == [0.0] * len(values)


def test_flat_tokens_become_rows_and_come_back():
    trajectory = torch.tensor([7, 7, 7, 2, 9, 9])
    rows_ = to_rows(trajectory)
    assert rows_.ids.tolist() == [7, 2, 9]
    assert rows_.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    flat = t64([1, 2, 3, 4, 5, 6])
    assert rows_.pad(flat, fill=-1).tolist() == [[1, 2, 3], [4, -1, -1], [5, 6, -1]]
    assert rows_.flat(rows_.pad(flat)).tolist() == flat.tolist()
    assert rows_.last().tolist() == [2, 3, 5]
    assert rows_.pad(trajectory).dtype == torch.int64
    assert rows_.pad(flat > 2).tolist() == [[False, False, True], [True, False, False], [True, True, False]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=6), st.permutations(range(6)))
def test_rows_of_any_trajectories_round_trip_with_their_gradient(counts, names):
    trajectory = torch.tensor([names[i] for i, n in enumerate(counts) for _ in range(n)], dtype=torch.int64)
    rows_ = to_rows(trajectory)
    assert rows_.mask.shape == (len(counts), max(counts, default=0))
    assert rows_.mask.sum(1).tolist() == counts
    flat = torch.arange(len(trajectory), dtype=torch.float64).requires_grad_()
    back = rows_.flat(rows_.pad(flat))
    assert back.tolist() == flat.tolist()
    (back * torch.arange(len(trajectory))).sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == list(range(len(trajectory)))


def test_tokens_of_a_trajectory_that_are_not_together_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        to_rows(torch.tensor([1, 2, 1]))
