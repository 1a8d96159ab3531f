"""Estimators of the divergence: exact expectations over a small vocabulary, and what may not leak."""

from __future__ import annotations

import math

import pytest
import torch

from learner.kl import kl_estimate

KINDS = ("k1", "k2", "k3")


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(2, 7, dtype=torch.float64)
    return torch.log_softmax(logits[0], 0), torch.log_softmax(logits[1], 0)


def everywhere(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_values_by_hand(kind, value):
    policy, reference = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    assert kl_estimate(policy, reference, everywhere(policy), kind).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    p, q = distributions()
    exact = (p.exp() * (p - q)).sum()
    expected = (p.exp() * kl_estimate(p, q, everywhere(p), kind)).sum()
    torch.testing.assert_close(expected, exact)


def test_the_gradient_of_k2_is_the_gradient_of_the_divergence():
    _, q = distributions()
    torch.manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((p.detach().exp() * kl_estimate(p, q, everywhere(p), "k2")).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_the_gradient_of_k3_by_hand():
    policy = torch.log(torch.tensor([0.5], dtype=torch.float64)).requires_grad_()
    reference = torch.log(torch.tensor([0.25], dtype=torch.float64))
    kl_estimate(policy, reference, everywhere(policy), "k3").sum().backward()
    assert policy.grad.item() == pytest.approx(1 - 0.5)  # d/dp (e^(r-p) - (r-p) - 1) = 1 - e^(r-p)


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
