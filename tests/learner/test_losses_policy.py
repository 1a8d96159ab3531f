"""Policy losses against slow float64 loops from the papers' formulas, with gradients, and against manual values."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.losses.policy import (
    Surrogate,
    cispo,
    clip_gain,
    clipped_surrogate,
    entropy_sum,
    gmpo,
    gspo,
    reinforce,
    sapo,
    weighted_sum,
)
from learner.algorithms.losses.trust_region import dppo, moved_too_far

JUNK = (math.nan, math.inf, -math.inf)


class Case(NamedTuple):
    """Tokens of a micro-batch, [N] float64 each; advantages are constant within a trajectory."""

    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    trajectory: torch.Tensor
    mask: torch.Tensor

    def spans(self) -> list[list[int]]:
        """Indices of the tokens of each trajectory that are not masked."""
        runs = groupby(range(len(self.mask)), key=lambda i: int(self.trajectory[i]))
        return [[i for i in run if self.mask[i]] for _, run in runs]


@st.composite
def cases(draw) -> Case:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    numbers = draw(st.lists(st.integers(-(2**40), 2**40), min_size=len(lengths), max_size=len(lengths), unique=True))
    n = sum(lengths)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 0.01, 0.5, 15.0]))

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    logprobs = -3 * normal(n).abs()
    worth = normal(len(lengths)) * (torch.rand(len(lengths), generator=generator) < 0.8)
    repeats = torch.tensor(lengths)
    columns = [logprobs, logprobs - spread * normal(n), worth.repeat_interleave(repeats)]
    for column, junk in zip(columns, JUNK, strict=True):
        column[~mask] = junk
    return Case(*columns, torch.tensor(numbers).repeat_interleave(repeats), mask)


Slow = Callable[[list[torch.Tensor], Case], list[torch.Tensor]]
"""Leaves (log-prob of each token) and the case to the loss of each token; what is masked does not appear."""


def bound(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    if x.item() < low:
        return torch.tensor(low, dtype=torch.float64)
    return torch.tensor(high, dtype=torch.float64) if x.item() > high else x


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a.item() >= b.item() else b


def ratio_of(leaf: torch.Tensor, case: Case, i: int) -> torch.Tensor:
    return bound(leaf - float(case.old[i]), -20.0, 20.0).exp()


def slow_ppo(leaves: list[torch.Tensor], case: Case, dual: float | None = None) -> list[torch.Tensor]:
    losses = []
    for i, leaf in enumerate(leaves):
        if case.mask[i]:
            a, r = float(case.advantages[i]), ratio_of(leaf, case, i)
            loss = larger(-a * r, -a * bound(r, 0.8, 1.28))
            if dual is not None and a < 0 and loss.item() > -dual * a:
                loss = torch.tensor(-dual * a, dtype=torch.float64)
            losses.append(loss)
    return losses


def slow_gspo(leaves: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    """Equation 5 literally: the ratio of the sequence carries the gradient of all its tokens."""
    losses = []
    for span in case.spans():
        if span:
            a = float(case.advantages[span[0]])
            x = sum(bound(leaves[i] - float(case.old[i]), -20.0, 20.0) for i in span) / len(span)
            s = x.exp()
            losses += [larger(-a * s, -a * bound(s, 0.97, 1.04))] * len(span)
    return losses


def slow_gmpo(leaves: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    losses = []
    for span in case.spans():
        product = torch.ones((), dtype=torch.float64)
        for i in span:
            a, r = float(case.advantages[i]), ratio_of(leaves[i], case, i)
            cut = bound(r, math.exp(-0.4), math.exp(0.5))
            if a > 0:
                r = r if r.item() <= cut.item() else cut
            elif a < 0:
                r = larger(r, cut)
            product = product * r ** (1 / len(span))
        losses += [-float(case.advantages[span[0]]) * product for _ in span]
    return losses


def slow_cispo(leaves: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    return [
        -bound(ratio_of(leaf, case, i), 0.5, 3.0).item() * float(case.advantages[i]) * leaf
        for i, leaf in enumerate(leaves)
        if case.mask[i]
    ]


def slow_sapo(leaves: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    losses = []
    for i, leaf in enumerate(leaves):
        if case.mask[i]:
            a, r = float(case.advantages[i]), ratio_of(leaf, case, i)
            tau = 1.0 if a > 0 else 1.05
            losses.append(-a * (4 / tau) / (1 + torch.exp(-tau * (r - 1))))
    return losses


def slow_reinforce(leaves: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    return [-float(case.advantages[i]) * leaf for i, leaf in enumerate(leaves) if case.mask[i]]


def slow_dppo(leaves, case, *, kind, low, high, symmetric=False, cap=math.inf):
    """Algorithm of the paper: the ratio as a weight, and a mask by where the probability went."""
    losses = []
    for i, leaf in enumerate(leaves):
        if case.mask[i]:
            a, now, before = float(case.advantages[i]), leaf.item(), float(case.old[i])
            p, q = math.exp(now), math.exp(before)
            if kind == "tv":
                size = abs(p - q)
            else:
                rest = [max(1 - x, 0.0) for x in (q, p)]  # of "another token"
                size = q * min(max(before - now, -20.0), 20.0)
                size += rest[0] * math.log((rest[0] + 1e-8) / (rest[1] + 1e-8))
            away = p > q if a > 0 else p < q
            bound_ = high if p > q else low
            drop = size > bound_ and (symmetric or away) and p != q
            r = ratio_of(leaf, case, i)
            weight = min(r.item(), cap)
            # the gradient of verl's -A sg(r) log pi, the value of prime-rl's -A r
            losses.append(leaf * 0 if drop else -a * weight * r / r.item())
    return losses


LOSSES: dict[str, tuple[Callable[..., Surrogate], Slow]] = {
    "ppo": (lambda c: clipped_surrogate(c.logprobs, c.old, c.advantages, c.mask, low=0.2, high=0.28), slow_ppo),
    "dual clip": (
        lambda c: clipped_surrogate(c.logprobs, c.old, c.advantages, c.mask, low=0.2, high=0.28, dual=3.0),
        lambda leaves, c: slow_ppo(leaves, c, dual=3.0),
    ),
    "gspo": (lambda c: gspo(c.logprobs, c.old, c.advantages, c.trajectory, c.mask, low=0.03, high=0.04), slow_gspo),
    "gmpo": (lambda c: gmpo(c.logprobs, c.old, c.advantages, c.trajectory, c.mask, low=0.4, high=0.5), slow_gmpo),
    "cispo": (lambda c: cispo(c.logprobs, c.old, c.advantages, c.mask, lower=0.5, upper=3.0), slow_cispo),
    "sapo": (lambda c: sapo(c.logprobs, c.old, c.advantages, c.mask), slow_sapo),
    "dppo tv": (
        lambda c: dppo(c.logprobs, c.old, c.advantages, c.mask, low=0.15, high=0.2, cap=20.0),
        lambda leaves, c: slow_dppo(leaves, c, kind="tv", low=0.15, high=0.2, cap=20.0),
    ),
    "dppo kl": (
        lambda c: dppo(c.logprobs, c.old, c.advantages, c.mask, low=0.05, high=0.1, divergence="kl", cap=3.0),
        lambda leaves, c: slow_dppo(leaves, c, kind="kl", low=0.05, high=0.1, cap=3.0),
    ),
    "ipo": (
        lambda c: dppo(c.logprobs, c.old, c.advantages, c.mask, low=0.1, high=0.1, symmetric=True),
        lambda leaves, c: slow_dppo(leaves, c, kind="tv", low=0.1, high=0.1, symmetric=True),
    ),
    "reinforce": (lambda c: reinforce(c.logprobs, c.old, c.advantages, c.mask), slow_reinforce),
}
NAMES = sorted(LOSSES)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_losses_and_gradients_are_those_of_a_slow_loop(name, case):
    fast, slow = LOSSES[name]
    weights = torch.zeros_like(case.logprobs)
    for number, span in enumerate(case.spans()):  # constant within a trajectory, as every aggregation is
        weights[span] = (number + 1) / max(len(span), 1)
    leaves = [torch.tensor(float(x), dtype=torch.float64, requires_grad=True) for x in case.logprobs]
    slow_losses = slow(leaves, case)
    slow_total = sum((w * x for w, x in zip(weights[case.mask].tolist(), slow_losses, strict=True)), torch.zeros(()))
    if slow_total.requires_grad:
        slow_total.backward()
    logprobs = case.logprobs.clone().requires_grad_()
    out = fast(case._replace(logprobs=logprobs))
    total = weighted_sum(out.loss, weights, case.mask)
    total.backward()
    expected = torch.tensor([0.0 if leaf.grad is None else float(leaf.grad) for leaf in leaves], dtype=torch.float64)
    torch.testing.assert_close(total.detach(), torch.tensor(slow_total.item(), dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-9, atol=1e-9)
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(out.ratio).all()
    assert not (out.loss[~case.mask].any() or out.ratio[~case.mask].any())
    for flags in (out.clipped, out.clipped_low, out.clipped_high, out.clipped_dual):
        assert flags.dtype == torch.bool
        assert not flags[~case.mask].any()
    assert torch.equal(out.clipped, out.clipped_low | out.clipped_high)


def one(ratio: float, advantage: float) -> Case:
    old = torch.tensor([math.log(0.2)], dtype=torch.float64)
    return Case(
        (old + math.log(ratio)).requires_grad_(),
        old,
        torch.tensor([advantage], dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([True]),
    )


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "gradient", "clips"),
    [
        # clips: low, high, dual
        ("dual clip", 5.0, -1.0, 3.0, 0.0, (0, 0, 1)),
        ("dual clip", 2.9, -1.0, 2.9, 2.9, (0, 0, 0)),  # the upper bound does not act on a negative advantage
        ("dual clip", 5.0, 1.0, -1.28, 0.0, (0, 1, 0)),
        ("dual clip", 0.5, -1.0, 0.8, 0.0, (1, 0, 0)),
        ("dual clip", 0.5, 1.0, -0.5, -0.5, (0, 0, 0)),
        ("dual clip", 5.0, 0.0, 0.0, 0.0, (0, 0, 0)),
        ("ppo", 5.0, -1.0, 5.0, 5.0, (0, 0, 0)),
        ("gspo", 1.01, 2.0, -2.02, -2.02, (0, 0, 0)),
        ("gspo", 1.1, 2.0, -2.08, 0.0, (0, 1, 0)),
        ("gspo", 0.9, -2.0, 1.94, 0.0, (1, 0, 0)),
        ("gmpo", 1.2, 1.0, -1.2, -1.2, (0, 0, 0)),
        ("gmpo", 2.0, 1.0, -math.exp(0.5), 0.0, (0, 1, 0)),
        ("gmpo", 2.0, -1.0, 2.0, 2.0, (0, 0, 0)),
        ("gmpo", 0.5, -1.0, math.exp(-0.4), 0.0, (1, 0, 0)),
        ("cispo", 1.0, 2.0, -2 * math.log(0.2), -2.0, (0, 0, 0)),
        ("cispo", 4.0, 1.0, -3 * math.log(0.8), -3.0, (0, 1, 0)),  # clipped, and still learning
        ("cispo", 0.25, -1.0, 0.5 * math.log(0.05), 0.5, (1, 0, 0)),
        ("sapo", 1.0, 2.0, -4.0, -2.0, (0, 0, 0)),
        ("sapo", 1.0, -2.0, 2 * 0.5 * 4 / 1.05, 2.0, (0, 0, 0)),
        ("dppo tv", 1.9, 1.0, -1.9, -1.9, (0, 0, 0)),  # p .2 -> .38
        ("dppo tv", 2.1, 1.0, 0.0, 0.0, (0, 1, 0)),
        ("dppo tv", 2.1, -1.0, 2.1, 2.1, (0, 0, 0)),  # on its way back
        ("dppo tv", 0.2, -1.0, 0.0, 0.0, (1, 0, 0)),
        ("dppo tv", 0.2, 1.0, -0.2, -0.2, (0, 0, 0)),
        ("dppo kl", 1.5, 1.0, -1.5, -1.5, (0, 0, 0)),
        ("dppo kl", 3.0, 1.0, 0.0, 0.0, (0, 1, 0)),
        ("dppo kl", 4.0, -1.0, 3.0, 3.0, (0, 0, 1)),  # the ratio is capped, and the gradient with it
        ("ipo", 1.4, -1.0, 1.4, 1.4, (0, 0, 0)),
        ("ipo", 1.6, -1.0, 0.0, 0.0, (0, 1, 0)),
        ("ipo", 0.4, 1.0, 0.0, 0.0, (1, 0, 0)),
        ("reinforce", 4.0, 2.0, -2 * math.log(0.8), -2.0, (0, 0, 0)),
    ],
)
def test_one_token_by_hand(name, ratio, advantage, loss, gradient, clips):
    case = one(ratio, advantage)
    out = LOSSES[name][0](case)
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(loss)
    assert case.logprobs.grad.item() == pytest.approx(gradient)
    assert out.ratio.item() == pytest.approx(abs(loss) if name == "gmpo" else ratio)  # gmpo's is one after the clip
    assert (out.clipped_low.item(), out.clipped_high.item(), out.clipped_dual.item()) == clips


def test_a_ratio_at_the_dual_clip_is_not_beyond_it():
    ratio = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    out = clip_gain(ratio, -torch.ones_like(ratio), torch.tensor([True]), low=0.2, high=0.28, dual=3.0)
    out.loss.sum().backward()
    assert (out.loss.item(), ratio.grad.item(), out.clipped_dual.item()) == (3.0, 1.0, False)


def test_sapos_gate_fades_faster_for_negative_advantages():
    def pull(advantage: float) -> float:
        case = one(1.8, advantage)
        sapo(case.logprobs, case.old, case.advantages, case.mask).loss.sum().backward()
        return abs(case.logprobs.grad.item())

    p = 1 / (1 + math.exp(-0.8))
    assert pull(1.0) == pytest.approx(4 * p * (1 - p) * 1.8)
    assert pull(-1.0) < pull(1.0)


def test_gspos_token_form_lets_tokens_differ_in_advantage():
    logprobs = torch.log(torch.tensor([0.2, 0.3], dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() - torch.tensor([0.02, -0.04], dtype=torch.float64)
    out = gspo(
        logprobs,
        old,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
        torch.tensor([7, 7]),
        torch.tensor([True, True]),
        low=0.2,
        high=0.2,
    )
    out.loss.sum().backward()
    s = math.exp((0.02 - 0.04) / 2)
    assert out.loss.tolist() == pytest.approx([-s, 2 * s])
    assert logprobs.grad.tolist() == pytest.approx([-s, 2 * s])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", JUNK)
def test_a_fully_masked_micro_batch_gives_zero_with_a_graph(name, bad):
    logprobs = torch.full((3,), bad, requires_grad=True)
    junk = torch.full((3,), bad)
    mask = torch.zeros(3, dtype=torch.bool)
    out = LOSSES[name][0](Case(logprobs, junk, junk, torch.tensor([0, 0, 0]), mask))
    total = weighted_sum(out.loss, junk, mask)
    total.backward()
    assert total.item() == 0
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_at_all_give_zero_with_a_graph(name):
    logprobs = torch.zeros(0, requires_grad=True)
    nothing, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    out = LOSSES[name][0](Case(logprobs, nothing, nothing, torch.zeros(0, dtype=torch.int64), mask))
    weighted_sum(out.loss, nothing, mask).backward()
    assert logprobs.grad.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_a_mask_of_numbers_is_refused(name, dtype):
    with pytest.raises(TypeError, match=r"torch\.bool"):
        LOSSES[name][0](one(1.0, 1.0)._replace(mask=torch.ones(1, dtype=dtype)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [25.0, -25.0, math.inf, -math.inf])
def test_policies_that_have_nothing_in_common_stay_finite(name, gap):
    """Ratios of e^25, e^-25, infinity and 0; the first two are clamped at e^+-20 and pass PPO's kin no gradient."""
    old = torch.tensor([-30.0 - gap if math.isfinite(gap) else -gap, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([-30.0, -1.0], dtype=torch.float64, requires_grad=True)
    case = Case(
        logprobs,
        old,
        torch.tensor([-1.0, -1.0], dtype=torch.float64),
        torch.tensor([0, 1]),
        torch.tensor([True, True]),
    )
    out = LOSSES[name][0](case)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(logprobs.grad).all()
    limit = -0.4 if name == "gmpo" and gap < 0 else math.copysign(20, gap)
    assert out.ratio[0].item() == pytest.approx(math.exp(limit))
    if name not in ("cispo", "reinforce"):
        assert logprobs.grad[0].item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_forbidden_token_of_no_advantage_gives_no_nan(name):
    logprobs = torch.tensor([-math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)
    out = LOSSES[name][0](Case(logprobs, zeros - 1, zeros, torch.tensor([0, 1]), torch.tensor([True, True])))
    out.loss.sum().backward()
    assert out.loss.abs().max().item() == 0
    assert logprobs.grad.abs().max().item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_old_log_probs_and_advantages_are_constants(name):
    old = torch.tensor([-1.1], requires_grad=True)
    advantages = torch.tensor([1.0], requires_grad=True)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    case = Case(logprobs, old, advantages, torch.tensor([0]), torch.tensor([True]))
    LOSSES[name][0](case).loss.sum().backward()
    assert old.grad is None
    assert advantages.grad is None
    assert logprobs.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_trajectories_does_not_matter(name):
    torch.manual_seed(3)
    logprobs = -torch.rand(6, dtype=torch.float64)
    old, advantages = logprobs - 0.3 * torch.randn(6), torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.5]).double()
    trajectory, mask = torch.tensor([4, 4, 9, 9, 9, 1]), torch.tensor([True, True, True, False, True, True])
    case = Case(logprobs, old, advantages, trajectory, mask)
    turned = torch.tensor([5, 2, 3, 4, 0, 1])
    fast = LOSSES[name][0]
    torch.testing.assert_close(
        fast(case).loss[turned], fast(Case(*(t[turned] for t in case))).loss, rtol=1e-14, atol=1e-14
    )


def test_bounds_that_make_no_sense_are_refused():
    c = one(1.0, 1.0)
    with pytest.raises(ValueError, match="above 1"):
        clipped_surrogate(c.logprobs, c.old, c.advantages, c.mask, low=0.2, high=0.2, dual=1.0)
    with pytest.raises(ValueError, match="lower"):
        cispo(c.logprobs, c.old, c.advantages, c.mask, lower=2.0, upper=1.0)


def test_the_entropy_is_summed_with_the_weights_of_the_loss():
    entropy = torch.tensor([2.0, math.nan, 0.5], requires_grad=True)
    total = entropy_sum(entropy, torch.tensor([0.25, math.nan, 0.5]), torch.tensor([True, False, True]))
    total.backward()
    assert total.item() == 0.75
    assert entropy.grad.tolist() == [0.25, 0.0, 0.5]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_probability_that_rounding_lifts_above_1_moves_as_one_of_1_does(divergence):
    """Float32 sums give log-probs such as +1e-7; their complement would be negative, and its logarithm NaN."""
    sure, rare, mask = torch.tensor([1e-7, 0.0]), torch.tensor([-3.0, -3.0]), torch.ones(2, dtype=torch.bool)
    below, above = moved_too_far(sure, rare, mask, low=0.1, high=0.1, divergence=divergence)
    assert (below.tolist(), above.tolist()) == ([False] * 2, [True] * 2)
    below, above = moved_too_far(rare, sure, mask, low=0.1, high=0.1, divergence=divergence)
    assert (below.tolist(), above.tolist()) == ([True] * 2, [False] * 2)
