"""Top-k divergences: proof by enumeration that value and gradient are unbiased, and that EMA-PG's gradient is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from learner.algorithms.kl.exact import topk_forward_kl, topk_reverse_kl
from tests.support.full_kl import full_forward_kl, full_reverse_kl

V = 12
SEEDS = (0, 1, 2, 3)


class World:
    """A policy with gradient, a reference and the policy that drew the tokens, over V tokens, float64.

    scale  of the logits: at 0.4 no token reaches a cap, and all expectations are exact
    """

    def __init__(self, seed: int, scale: float = 0.4) -> None:
        torch.manual_seed(seed)
        self.logits = (scale * torch.randn(V, dtype=torch.float64)).requires_grad_()
        self.policy = torch.log_softmax(self.logits, 0)
        self.reference = torch.log_softmax(scale * torch.randn(V, dtype=torch.float64), 0)
        self.sampler = torch.log_softmax(self.logits.detach() + 0.5 * torch.randn(V, dtype=torch.float64), 0)
        self.mask = torch.ones(V, dtype=torch.bool)

    def estimates(
        self, function: Callable[..., torch.Tensor], head: torch.Tensor, **more: torch.Tensor
    ) -> torch.Tensor:
        """[V]: the estimate for each token that might have been drawn."""
        inside = (head[None, :] == torch.arange(V)[:, None]).any(-1)
        return function(
            self.policy[head].expand(V, -1),
            self.reference[head].expand(V, -1),
            self.policy,
            self.reference,
            inside,
            self.mask,
            **more,
        )

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]

    def full(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return function(self.policy[None], self.reference[None], torch.tensor([True])).sum()


def ema_pg_reverse(policy_head, reference_head, policy, reference, inside, mask):
    head = (policy_head.exp() * (policy_head - reference_head)).sum(-1)
    r = (policy - policy.detach()).exp()
    return head + torch.where(inside, 0.0, r * (policy - reference).detach())


def ema_pg_forward(policy_head, reference_head, policy, reference, inside, mask):
    head = (reference_head.exp() * (reference_head - policy_head)).sum(-1)
    log_w, log_r = reference - policy, policy - policy.detach()
    return head + torch.where(inside, 0.0, log_w.detach().exp() * log_w + log_r)


CASES = {
    "reverse": (topk_reverse_kl, full_reverse_kl, ema_pg_reverse),
    "forward": (topk_forward_kl, full_forward_kl, ema_pg_forward),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [0, 2, 4, 8, V])
@pytest.mark.parametrize("way", CASES)
@pytest.mark.parametrize("drawn", ["policy", "another policy"])
def test_the_expected_value_and_gradient_are_those_of_the_full_divergence(way, k, seed, drawn):
    world = World(seed)
    function, full, _ = CASES[way]
    head = (world.sampler if way == "reverse" else world.reference).topk(k).indices
    if drawn == "policy":
        chances, estimates = world.policy.detach().exp(), world.estimates(function, head)
    else:
        # The head is exact for any sampling policy; only the tail is weighted.
        chances = world.sampler.exp()
        estimates = world.estimates(function, head, importance=world.sampler)
    mean, exact = (chances * estimates).sum(), world.full(full)
    torch.testing.assert_close(mean, exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(world.gradient(mean), world.gradient(exact), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", CASES)
def test_any_head_will_do_that_is_chosen_without_the_drawn_token(way, seed):
    world = World(seed)
    function, full, _ = CASES[way]
    mean = (world.policy.detach().exp() * world.estimates(function, torch.randperm(V)[:5])).sum()
    torch.testing.assert_close(mean, world.full(full), rtol=0, atol=1e-12)
    torch.testing.assert_close(world.gradient(mean), world.gradient(world.full(full)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", CASES)
def test_a_head_of_the_whole_vocabulary_is_the_full_divergence_whatever_was_drawn(way, seed):
    world = World(seed)
    function, full, _ = CASES[way]
    estimates = world.estimates(function, torch.arange(V), importance=world.sampler)
    torch.testing.assert_close(estimates, world.full(full).expand(V), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", CASES)
def test_the_tail_as_ema_pg_has_it_has_a_biased_gradient(way, seed):
    """Why ours differs: theirs has the right value, and the right gradient only where the head is empty or whole."""
    world = World(seed)
    _, full, theirs = CASES[way]
    for k in (0, 2, 4, 8, V):
        head = (world.sampler if way == "reverse" else world.reference).topk(k).indices
        mean = (world.policy.detach().exp() * world.estimates(theirs, head)).sum()
        torch.testing.assert_close(mean, world.full(full), rtol=0, atol=1e-12)
        wanted = world.gradient(world.full(full))
        error = float((world.gradient(mean) - wanted).norm() / wanted.norm())
        assert error < 1e-12 if k in (0, V) else error > 1e-3


@pytest.mark.parametrize("way", CASES)
def test_a_tail_far_from_reference_and_sampler_stays_bounded(way):
    """As k5's and the importance weight's caps: at most 10 times 10 (forward), 10 times 20 (reverse)."""
    function, _, _ = CASES[way]
    reference = torch.tensor([15.0, 15.0, -15.0], dtype=torch.float64)
    sampler = torch.tensor([0.0, -12.0, -12.0], dtype=torch.float64)
    policy = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    head, mask = torch.zeros((3, 0), dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    estimate = function(head, head, policy, reference, ~mask, mask, importance=sampler)
    estimate.sum().backward()
    if way == "forward":
        assert estimate.tolist() == pytest.approx([10, 100, -150 * math.exp(-15)])
        assert policy.grad.tolist() == pytest.approx([0, 0, -10 * math.exp(-15)])
    else:
        assert estimate.tolist() == pytest.approx([-15, -150, 150])
        assert policy.grad.tolist() == pytest.approx([-14, -140, 160])


def test_one_token_by_hand():
    """A head of one token with p = 0.5, q = 0.25; the drawn token, p = 0.2, q = 0.1, is outside."""
    head = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    drawn = torch.tensor([math.log(0.2)], dtype=torch.float64, requires_grad=True)
    reference_head = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    reference = torch.tensor([math.log(0.1)], dtype=torch.float64)
    outside, mask = torch.tensor([False]), torch.tensor([True])
    ln2 = math.log(2)

    estimate = topk_reverse_kl(head, reference_head, drawn, reference, outside, mask)
    assert estimate.item() == pytest.approx(0.5 * ln2 + ln2)
    grads = torch.autograd.grad(estimate.sum(), (head, drawn))
    assert [g.item() for g in grads] == pytest.approx([0.5 * (ln2 + 1), ln2 + 1])

    estimate = topk_forward_kl(head, reference_head, drawn, reference, outside, mask)
    assert estimate.item() == pytest.approx(-0.25 * ln2 - 0.5 * ln2)
    grads = torch.autograd.grad(estimate.sum(), (head, drawn))
    assert [g.item() for g in grads] == pytest.approx([-0.25, -0.5])

    # drawn from a policy that gave the token 0.1: it came half as often as it would have
    twice = torch.tensor([math.log(0.1)], dtype=torch.float64)
    assert topk_reverse_kl(head, reference_head, drawn, reference, outside, mask, twice).item() == pytest.approx(
        0.5 * ln2 + 2 * ln2
    )
    inside = topk_reverse_kl(head, reference_head, drawn, reference, ~outside, mask, twice)
    assert inside.item() == pytest.approx(0.5 * ln2)


@pytest.mark.parametrize("function", [topk_reverse_kl, topk_forward_kl])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_reaches_neither_value_nor_gradient(function, bad):
    head = torch.tensor([[-0.5, -2.0], [bad, bad], [bad, -1.0]], requires_grad=True)
    drawn = torch.tensor([-3.0, bad, bad], requires_grad=True)
    reference_head, reference = torch.tensor([[-0.6, -1.0], [bad, bad], [bad, bad]]), torch.tensor([-2.5, bad, -1.0])
    outside, mask = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, False])
    estimate = function(head, reference_head, drawn, reference, outside, mask, torch.tensor([-2.0, bad, bad]))
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert estimate[1:].tolist() == [0.0, 0.0]
    for grad in (head.grad, drawn.grad):
        assert torch.isfinite(grad).all()
        assert not grad[1:].any()
        assert grad[0].any()


@pytest.mark.parametrize("function", [topk_reverse_kl, topk_forward_kl])
def test_a_fully_masked_micro_batch_gives_zero_with_a_graph(function):
    head = torch.full((2, 3), math.nan, requires_grad=True)
    drawn = torch.full((2,), math.nan, requires_grad=True)
    nothing = torch.zeros(2, dtype=torch.bool)
    total = function(head, head.detach(), drawn, drawn.detach(), nothing, nothing).sum()
    total.backward()
    assert total.item() == 0
    assert not head.grad.any()
    assert not drawn.grad.any()


@pytest.mark.parametrize("function", [topk_reverse_kl, topk_forward_kl])
def test_forbidden_tokens_in_the_head_and_far_policies_stay_finite(function):
    head = torch.tensor([[0.0, -math.inf], [-200.0, 0.0]], requires_grad=True)
    drawn = torch.tensor([-100.0, -math.inf], requires_grad=True)
    reference_head = torch.tensor([[-math.inf, -math.inf], [0.0, -300.0]])
    outside, mask = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    estimate = function(head, reference_head, drawn, torch.tensor([0.0, -1.0]), outside, mask)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(head.grad).all()
    assert torch.isfinite(drawn.grad).all()


@pytest.mark.parametrize("function", [topk_reverse_kl, topk_forward_kl])
def test_masks_of_numbers_and_shapes_that_differ_are_refused(function):
    head, drawn, flag = torch.zeros(1, 2), torch.zeros(1), torch.tensor([True])
    with pytest.raises(TypeError, match=r"torch\.bool"):
        function(head, head, drawn, drawn, torch.tensor([1]), flag)
    with pytest.raises(TypeError, match=r"torch\.bool"):
        function(head, head, drawn, drawn, flag, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="fit"):
        function(head, torch.zeros(1, 3), drawn, drawn, flag, flag)


@pytest.mark.parametrize("function", [topk_reverse_kl, topk_forward_kl])
def test_the_reference_and_the_sampler_are_constants(function):
    head, drawn = torch.full((1, 2), -1.0, requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    fixed = [torch.full((1, 2), -1.2, requires_grad=True), *(torch.tensor([-1.5], requires_grad=True) for _ in "ab")]
    outside, mask = torch.tensor([False]), torch.tensor([True])
    function(head, fixed[0], drawn, fixed[1], outside, mask, fixed[2]).sum().backward()
    assert [f.grad for f in fixed] == [None, None, None]
    assert head.grad is not None
    assert drawn.grad is not None
