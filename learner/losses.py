"""Log-probs of sampled tokens and the losses built on them (pure torch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from learner.kl import LOG_RATIO_LIMIT


class Scores(NamedTuple):
    """Of N tokens, [N] float32: log-probs, and entropies (nats) of the distributions that they come from."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


class Surrogate(NamedTuple):
    """Of each token: its loss, its ratio to the proximal policy (0 where masked), and whether that was clipped."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def score_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropy_gradient: bool = False
) -> Scores:
    """Scores of softmax(logits / temperature), in float32.

    logits [N, V] of any float dtype, targets [N] int64. The temperature is the sampler's: without it the log-probs
    would be those of another distribution than the one that the engines sampled from. The entropy carries a gradient
    only when asked to, since that keeps another [N, V] alive until the backward pass.
    """
    scaled = logits.float() / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        # 0 * -inf is NaN: a token that the model forbids adds nothing to the entropy
        mean = (torch.softmax(scaled, dim=-1) * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1)
        entropy = normaliser - mean
    return Scores(chosen - normaliser, entropy)


def score_hidden(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    temperature: float,
    vocabulary: int,
    chunk_bytes: int,
    entropy_gradient: bool = False,
) -> Scores:
    """Scores of `project(hidden)` without ever holding more than `chunk_bytes` of float32 logits.

    hidden [N, H], targets [N] int64. Where one chunk does not suffice, each is computed again in the backward pass.
    """
    rows = max(1, chunk_bytes // (4 * vocabulary))

    def chunk(part: torch.Tensor, wanted: torch.Tensor) -> Scores:
        return score_logits(project(part), wanted, temperature, entropy_gradient=entropy_gradient)

    if len(targets) <= rows:
        return chunk(hidden, targets)
    pairs = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    if torch.is_grad_enabled():
        scores = [checkpoint(chunk, part, wanted, use_reentrant=False) for part, wanted in pairs]
    else:
        scores = [chunk(part, wanted) for part, wanted in pairs]
    return Scores(torch.cat([s.logprobs for s in scores]), torch.cat([s.entropy for s in scores]))


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log(policy / old) clamped to +-20 (gradient 0 beyond), 0 where `mask` is False whatever stands there."""
    return torch.where(mask, logprobs - old, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for each token, to be minimised, with r = policy / old.

    PPO (arXiv 1707.06347, equation 7) with the two bounds apart (DAPO, arXiv 2503.14476). `old` and `advantages` are
    constants. All of one shape; masked positions get loss 0 and pass no gradient.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    gain = torch.where(mask, advantages.detach(), 0.0)
    free, bounded = -gain * ratio, -gain * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bounded), torch.where(mask, ratio.detach(), 0.0), bounded > free)


def importance_weight(old: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor, cap: float) -> torch.Tensor:
    """min(old / behaviour, cap) for each token, a constant: how much the sampler under- or overdrew it.

    Truncated importance sampling of decoupled PPO (AReaL, arXiv 2505.24298, equation 5); 1 where masked.
    """
    return log_ratio(old, behaviour, mask).exp().clamp(max=cap).detach()


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of values * weights where `mask` holds, as a scalar; masked values may be NaN."""
    return (torch.where(mask, values, 0.0) * weights).sum()
