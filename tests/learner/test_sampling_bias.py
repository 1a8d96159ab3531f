"""What top-p and top-k do to the gradient, by enumeration: docs/algorithms.md, "Top-p and top-k sampling"."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.model.logprobs import score_logits
from rollout_server.cpu_engine.model.sampler import SamplingBatch, sample

V = 7
LOGITS = [1.3, -0.4, 0.9, 0.1, -1.2, 2.0, -2.5]
ADVANTAGES = [0.7, -1.0, 0.3, 2.0, -0.6, -0.2, 5.0]


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def kept(probs: list[float], top_p: float, top_k: int) -> list[int]:
    """The tokens that are drawn from: the `top_k` likeliest, of which the likeliest until `top_p` is passed."""
    order, inside, mass = sorted(range(V), key=lambda i: -probs[i]), [], 0.0
    for place, token in enumerate(order):
        if place < top_k and mass <= top_p:
            inside.append(token)
        mass += probs[token]
    return inside


def value(logits: list[float], inside: list[int], constant: float = 0.0) -> float:
    """The expected advantage under the distribution that is drawn from."""
    probs = softmax(logits)
    mass = sum(probs[i] for i in inside)
    return sum(probs[i] / mass * (ADVANTAGES[i] + constant) for i in inside)


def slope(function, at: int) -> float:
    """Central difference in logit `at`."""
    up, down = list(LOGITS), list(LOGITS)
    up[at] += 1e-6
    down[at] -= 1e-6
    return (function(up) - function(down)) / 2e-6


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, V), (0.9, V), (1.0, 3), (0.8, 2), (1.0, V)])
def test_the_estimate_is_the_gradient_of_what_is_drawn_plus_a_push_on_the_kept_mass(top_p: float, top_k: int) -> None:
    """E_q[A grad log p] = grad E_q[A] + E_q[A] grad log p(kept), q = p over what is kept."""
    probs = softmax(LOGITS)
    inside = kept(probs, top_p, top_k)
    mass = sum(probs[i] for i in inside)
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    loss = sum(probs[i] / mass * ADVANTAGES[i] * logprobs[i] for i in inside)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert logits.grad is not None
    mean = value(LOGITS, inside)
    for token in range(V):
        drawn = slope(lambda x: value(x, inside), token)
        push = slope(lambda x: math.log(sum(softmax(x)[i] for i in inside)), token)
        assert float(logits.grad[token]) == pytest.approx(drawn + mean * push, abs=1e-8)
    assert (len(inside) == V) == (top_p == 1 and top_k == V)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 1 << 30), (1.0, 2), (0.8, 3), (1.0, 1 << 30)])
def test_engine_and_learner_score_a_token_alike_whatever_was_left_out(
    temperature: float, top_p: float, top_k: int
) -> None:
    """The ratio at lag 0 is 1, and every token comes from what is kept."""
    rows = 64
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(3)) * 2
    rules = SamplingBatch(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.zeros(rows, np.int64),
    )
    drawn = sample(logits.clone(), rules)
    scores = score_logits(logits, drawn.tokens, temperature)
    ratios = (scores.logprobs - drawn.logprobs).exp()
    torch.testing.assert_close(ratios, torch.ones(rows), atol=1e-5, rtol=0)
    for row in range(rows):
        probs = softmax([x / temperature for x in logits[row].tolist()])
        assert int(drawn.tokens[row]) in kept(probs, top_p, top_k)
