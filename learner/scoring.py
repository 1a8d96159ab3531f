"""Log-probs and entropies of sampled tokens from logits or hidden states, in bounded memory (pure torch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Scores(NamedTuple):
    """Of N tokens, [N] float32: log-probs, and entropies (nats) of the distributions that they come from."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


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
