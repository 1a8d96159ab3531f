"""Estimators of the divergence: exact expectations and gradients over a small vocabulary, and what may not leak."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.kl.estimators import kl_estimate
from tests.support.full_kl import full_forward_kl, full_reverse_kl

KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "k3++", "k4", "k5")
REVERSE_VALUE = ("k1", "k3", "k1+", "k3+", "k3++", "k4")
REVERSE_GRADIENT = ("k2", "k1+", "k3+", "k3++", "k4")


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """So close that no token reaches a cap: the table's expectations are those of tokens below it."""
    torch.manual_seed(0)
    logits = 0.5 * torch.randn(2, 7, dtype=torch.float64)
    return torch.log_softmax(logits[0], 0), torch.log_softmax(logits[1], 0)


def everywhere(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [  # policy 0.5, reference 0.25: x = -log 2, w = 0.5
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),
        ("abs", math.log(2), 1.0),
        ("k1+", math.log(2), math.log(2)),
        ("k3+", 0.5 - 1 + math.log(2), math.log(2)),
        ("k3++", 0.5 - 1 + math.log(2), (0.5 - 1 + math.log(2)) + (1 - 0.5)),
        ("k4", math.log(2), math.log(2)),
        ("k5", -0.5 * math.log(2), 1 - 0.5),
    ],
)
def test_one_token_by_hand(kind, value, gradient):
    policy = torch.log(torch.tensor([0.5], dtype=torch.float64)).requires_grad_()
    reference = torch.log(torch.tensor([0.25], dtype=torch.float64))
    estimate = kl_estimate(policy, reference, everywhere(policy), kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, rel=1e-12)
    assert policy.grad.item() == pytest.approx(gradient, rel=1e-12)


def expected(kind: str, drawn: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expectation of an estimate and of its gradient over tokens drawn from the policy or from another one, with the
    logits, the policy and the reference that gave them.
    """
    _, q = distributions()
    torch.manual_seed(1)
    logits = (0.5 * torch.randn(7, dtype=torch.float64)).requires_grad_()
    p = torch.log_softmax(logits, 0)
    other = torch.log_softmax(0.5 * torch.randn(7, dtype=torch.float64), 0)
    sampler, importance = (p.detach(), None) if drawn == "policy" else (other, other)
    value = (sampler.exp() * kl_estimate(p, q, everywhere(p), kind, importance)).sum()
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    return value, gradient, logits, p, q


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("drawn", ["policy", "another"])
@pytest.mark.parametrize("kind", KINDS)
def test_expected_values_are_those_of_the_table(kind, drawn):
    value, _, _, p, q = expected(kind, drawn)
    p = p.detach()
    if kind in REVERSE_VALUE:
        wanted = (p.exp() * (p - q)).sum()
    elif kind == "k5":
        wanted = (q.exp() * (q - p)).sum()
    else:
        wanted = (p.exp() * ((p - q).square() / 2 if kind == "k2" else (p - q).abs())).sum()
    assert_same(value.detach(), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradients_on_policy_are_those_of_the_table(kind):
    _, gradient, logits, p, q = expected(kind, "policy")
    if kind == "k1":
        wanted = 0 * p.sum()
    elif kind in REVERSE_GRADIENT:
        wanted = (p.exp() * (p - q)).sum()
    elif kind == "abs":
        wanted = (p.exp() - q.exp()).abs().sum()
    else:
        wanted = (q.exp() * (q - p)).sum()
    assert_same(gradient, torch.autograd.grad(wanted, logits)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradients_with_importance_weights(kind):
    """Off policy k1 and k3 become right for the reverse divergence, and the others stay what they are."""
    _, gradient, logits, p, q = expected(kind, "another")
    if kind in (*REVERSE_GRADIENT, "k1", "k3"):
        wanted = (p.exp() * (p - q)).sum()
    elif kind == "abs":
        wanted = (p.exp() * (p - q).abs()).sum()
    else:
        wanted = (q.exp() * (q - p)).sum()
    assert_same(gradient, torch.autograd.grad(wanted, logits)[0])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"k3\+\+"):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.tensor([True]), "k6")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_numbers_is_refused(kind):
    with pytest.raises(TypeError, match=r"torch\.bool"):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.ones(1), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_and_the_sampler_are_constants(kind):
    policy, reference, sampler = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.5, -0.8))
    kl_estimate(policy, reference, everywhere(policy), kind, sampler).sum().backward()
    assert reference.grad is None
    assert sampler.grad is None
    assert policy.grad is not None


CAPPED = ("k3", "k3+", "k3++", "k5")


def slow_estimate(distance: float, kind: str) -> tuple[float, float]:
    """Value and slope at log reference - log policy = `distance`: clamped at 20, CAPPED kinds at most 10."""
    x = min(max(distance, -20.0), 20.0)
    w = math.exp(x)
    value, slope = {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (math.expm1(x) - x, 1 - w),
        "abs": (abs(x), -math.copysign(1.0, x) if x else 0.0),
        "k1+": (-x, -x),
        "k3+": (math.expm1(x) - x, -x),
        "k3++": (math.expm1(x) - x, -x),
        "k4": (-x, -x),
        "k5": (w * x, 1 - w),
    }[kind]
    if kind in CAPPED and value > 10:
        value, slope = 10.0, slope if kind == "k3+" else 0.0
    return value, slope if abs(distance) < 20 else 0.0


def slow_weighted(distance: float, ahead: float, kind: str) -> tuple[float, float]:
    """The same times exp(ahead), at most 10; ahead = log policy - log sampler, clamped at 20."""
    value, slope = slow_estimate(distance, kind)
    ratio = math.exp(min(max(ahead, -20.0), 20.0))
    if kind not in ("k1", "k3", "abs"):
        return min(ratio, 10.0) * value, min(ratio, 10.0) * slope
    if ratio > 10:
        return 10 * value, 0.0
    return ratio * value, ratio * slope + (ratio * value if abs(ahead) < 20 else 0.0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=9)
)
def test_estimates_and_gradients_are_those_of_a_slow_loop(kind, rows):
    policy, reference, sampler = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in range(3))
    mask = torch.tensor([r[3] for r in rows])
    alone = [slow_estimate(q - p, kind) if kept else (0.0, 0.0) for p, q, _, kept in rows]
    weighted = [slow_weighted(q - p, p - s, kind) if kept else (0.0, 0.0) for p, q, s, kept in rows]
    policy[~mask], reference[~mask], sampler[~mask] = math.nan, math.inf, -math.inf
    for importance, wanted in ((None, alone), (sampler, weighted)):
        leaf = policy.clone().requires_grad_()
        found = kl_estimate(leaf, reference, mask, kind, importance)
        found.sum().backward()
        assert found.tolist() == pytest.approx([value for value, _ in wanted], rel=1e-9, abs=1e-9)
        assert leaf.grad.tolist() == pytest.approx([slope for _, slope in wanted], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("distance", [3.0, 15.0, 19.9, 400.0, -12.0])
@pytest.mark.parametrize("kind", CAPPED)
def test_a_token_far_from_the_reference_counts_ten_and_moves_nothing(kind, distance):
    """verl's, OpenRLHF's and Search-R1's cap of k3; below, k5 has none to reach: w x >= -1 / e."""
    policy = torch.full((1,), -500.0, dtype=torch.float64, requires_grad=True)
    reference = policy.detach() + distance
    estimate = kl_estimate(policy, reference, everywhere(policy), kind)
    estimate.sum().backward()
    if kind == "k5" and distance < 0:
        assert estimate.item() == pytest.approx(-12 * math.exp(-12))
    else:
        assert estimate.item() == 10
        assert policy.grad.item() == pytest.approx(-distance if kind == "k3+" and distance < 20 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_leaves_value_and_gradient_bounded(kind):
    """Ratios up to e^40 at any distance from the reference: at most 10 times what the estimate alone may be."""
    steps = torch.linspace(-40, 40, 81, dtype=torch.float64)
    reference, sampler = (x.flatten() for x in torch.meshgrid(steps, steps, indexing="ij"))
    policy = torch.zeros_like(sampler, requires_grad=True)
    estimate = kl_estimate(policy, reference, everywhere(policy), kind, sampler)
    estimate.sum().backward()
    assert estimate.abs().max() <= (2000 if kind == "k2" else 100 if kind in CAPPED else 200)
    assert policy.grad.abs().max() <= 210


def test_the_full_divergences_are_those_of_a_slow_loop():
    p, q = distributions()
    a, b = p.tolist(), q.tolist()
    mask = torch.tensor([True, False, True])
    policy, reference = torch.stack([p, p * math.nan, q]), torch.stack([q, q * math.inf, q])
    policy.requires_grad_()
    reverse, forward = full_reverse_kl(policy, reference, mask), full_forward_kl(policy, reference, mask)
    wanted = [sum(math.exp(x) * (x - y) for x, y in zip(a, b, strict=True)), 0.0, 0.0]
    assert reverse.tolist() == pytest.approx(wanted, abs=1e-15)
    wanted = [sum(math.exp(y) * (y - x) for x, y in zip(a, b, strict=True)), 0.0, 0.0]
    assert forward.tolist() == pytest.approx(wanted, abs=1e-15)
    (reverse + forward).sum().backward()
    # d/dx (e^x (x - y)) = e^x (x - y + 1), and d/dx (e^y (y - x)) = -e^y
    by_hand = [math.exp(x) * (x - y + 1) - math.exp(y) for x, y in zip(a, b, strict=True)]
    assert policy.grad[0].tolist() == pytest.approx(by_hand, abs=1e-15)
    assert policy.grad[1].tolist() == [0.0] * 7


def test_forbidden_tokens_add_nothing_to_a_full_divergence():
    policy = torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]], requires_grad=True)
    reference = torch.log(torch.tensor([[0.25, 0.5, 0.25]]))
    mask = torch.tensor([True])
    reverse = full_reverse_kl(policy, reference, mask)
    reverse.sum().backward()
    assert reverse.item() == pytest.approx(0.5 * math.log(2))
    assert torch.isfinite(policy.grad).all()
    assert full_forward_kl(policy.detach(), reference, mask).item() == math.inf
    assert full_forward_kl(reference, policy.detach(), mask).item() == pytest.approx(0.5 * math.log(2))
    with pytest.raises(ValueError, match="shapes"):
        full_reverse_kl(policy, reference, torch.tensor([True, True]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_what_is_masked_reaches_neither_value_nor_gradient(kind, bad):
    policy = torch.tensor([-1.0, bad, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, bad])
    estimate = kl_estimate(policy, reference, torch.tensor([True, False, False]), kind)
    estimate.sum().backward()
    assert estimate[1:].tolist() == [0.0, 0.0]
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(policy.grad).all()
    assert policy.grad[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_policies_far_apart_stay_finite(kind):
    policy, reference = torch.tensor([-1000.0, -0.1]), torch.tensor([-0.1, -1000.0])
    assert torch.isfinite(kl_estimate(policy, reference, everywhere(policy), kind)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_do_not_diverge(kind):
    p, _ = distributions()
    assert kl_estimate(p, p, everywhere(p), kind).abs().max() == 0


def test_k3_keeps_its_digits_when_policies_are_close():
    policy = torch.tensor([-1.0])
    reference = policy + 1e-3
    x = float(reference - policy)
    exact = math.expm1(x) - x
    assert kl_estimate(policy, reference, everywhere(policy), "k3").item() == pytest.approx(exact, rel=1e-3)
