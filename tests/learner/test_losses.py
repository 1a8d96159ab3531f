"""Log-probs and losses against slow loops in float64, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from learner.algorithms.losses.policy import clipped_surrogate, log_ratio, weighted_sum
from learner.model.logprobs import score_hidden, score_logits


def slow_scores(logits: torch.Tensor, targets: list[int], temperature: float) -> tuple[list[float], list[float]]:
    logprobs, entropies = [], []
    for row, target in zip(logits.tolist(), targets, strict=True):
        powers = [math.exp(x / temperature) for x in row]
        p = [x / sum(powers) for x in powers]
        logprobs.append(math.log(p[target]))
        entropies.append(-sum(x * math.log(x) for x in p))
    return logprobs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_scores_are_those_of_a_slow_loop(temperature):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 11), torch.tensor([0, 10, 3, 3, 7])
    scores = score_logits(logits, targets, temperature)
    logprobs, entropies = slow_scores(logits, targets.tolist(), temperature)
    torch.testing.assert_close(scores.logprobs, torch.tensor(logprobs), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores.entropy, torch.tensor(entropies), rtol=1e-5, atol=1e-6)


def test_a_forbidden_token_does_not_make_the_entropy_nan():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert score_logits(logits, torch.tensor([0]), 1.0).entropy.item() == pytest.approx(math.log(2))


def test_bfloat16_logits_are_scored_in_float32():
    scores = score_logits(torch.randn(2, 5, dtype=torch.bfloat16), torch.tensor([0, 1]), 1.0)
    assert scores.logprobs.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_chunks_change_neither_scores_nor_gradients(rows):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(7, 4), torch.randn(9, 4), torch.randint(0, 9, (7,))
    found = []
    for chunk_bytes in (4 * 9 * rows, 1 << 20):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = score_hidden(
            h,
            targets,
            lambda part, w=w: part @ w.T,
            temperature=0.9,
            vocabulary=9,
            chunk_bytes=chunk_bytes,
            entropy_gradient=True,
        )
        (scores.logprobs.sum() + 0.3 * scores.entropy.sum()).backward()
        found.append((scores.logprobs, scores.entropy, h.grad, w.grad))
    for chunked, whole in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_chunks_hold_no_more_logits_than_allowed():
    widest = 0

    def project(part: torch.Tensor) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len(part) * 1000 * 4)
        return torch.zeros(len(part), 1000)

    hidden, targets = torch.zeros(50, 2), torch.zeros(50, dtype=torch.int64)
    score_hidden(hidden, targets, project, temperature=1.0, vocabulary=1000, chunk_bytes=20_000)
    assert 0 < widest <= 20_000


def test_the_entropy_has_a_gradient_only_on_request():
    logits = torch.randn(3, 5, requires_grad=True)
    assert not score_logits(logits, torch.tensor([0, 1, 2]), 1.0).entropy.requires_grad
    assert score_logits(logits, torch.tensor([0, 1, 2]), 1.0, entropy_gradient=True).entropy.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 1.0, -1.1, -1.1, False),
        (1.5, 1.0, -1.28, 0.0, True),  # gained enough: no more push
        (0.5, 1.0, -0.5, -0.5, False),  # lost what is good: full push back
        (0.5, -1.0, 0.8, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_surrogate_by_hand(ratio, advantage, loss, gradient, clipped):
    logprobs = torch.tensor([math.log(0.2 * ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(0.2)], dtype=torch.float64)
    out = clipped_surrogate(
        logprobs, old, torch.tensor([advantage], dtype=torch.float64), torch.tensor([True]), low=0.2, high=0.28
    )
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(loss)
    assert out.ratio.item() == pytest.approx(ratio)
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert bool(out.clipped.item()) is clipped


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_masked_tokens_reach_neither_loss_nor_gradient(bad):
    logprobs = torch.tensor([-1.0, bad, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, bad, -1.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, bad])
    mask = torch.tensor([True, False, False, False])
    out = clipped_surrogate(logprobs, old, advantages, mask, low=0.2, high=0.28)
    total = weighted_sum(out.loss, torch.tensor([1.0, 0.0, 0.0, 0.0]), mask)
    total.backward()
    assert total.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert not out.clipped[1:].any()
    assert log_ratio(logprobs, old, mask).tolist() == [0.0] * 4
    assert weighted_sum(torch.tensor([2.0, bad]), torch.tensor([0.5, 0.0]), mask[:2]).item() == 1.0


def test_an_absurd_ratio_is_cut_off_in_the_logarithm():
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0])
    x = log_ratio(logprobs, old, torch.tensor([True, True]))
    assert x.tolist() == [20.0, -20.0]
    x.exp().sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_the_proximal_policy_and_the_advantage_are_constants():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    old, advantages = torch.tensor([-1.1], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    clipped_surrogate(logprobs, old, advantages, torch.tensor([True]), low=0.2, high=0.28).loss.sum().backward()
    assert old.grad is None
    assert advantages.grad is None
