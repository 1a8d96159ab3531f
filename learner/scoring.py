"""Log-probs and entropies of sampled tokens from logits or hidden states, in bounded memory (pure torch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Scores(NamedTuple):
    """Of N tokens, float32 (float64 where the inputs are).

    logprobs [N]     of the tokens
    entropy  [N]     in nats, of the distributions that they come from
    at       [N, k]  log-probs of the k given ids at each place; where none were given, those of `top`, without gradient
    top      [N, k]  int64, the k likeliest ids at each place, most likely first; None where none were asked for
    values   [N]     the critic's, None where the policy carries no value head
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    at: torch.Tensor | None = None
    top: torch.Tensor | None = None
    values: torch.Tensor | None = None


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    top: int = 0,
    at_ids: torch.Tensor | None = None,
    among: int | None = None,
) -> Scores:
    """Scores of softmax(logits / temperature), in float32; `top` is chosen among the first `among` ids, None: all.

    logits [N, V] of any float dtype, targets [N] int64, at_ids [N, k] int64. The temperature is the sampler's: without
    it the log-probs would be those of another distribution than the one that the engines sampled from. The entropy
    carries a gradient only when asked to, since that keeps another [N, V] alive until the backward pass.
    """
    scaled = wide(logits) / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        # 0 * -inf is NaN: a token that the model forbids adds nothing to the entropy
        mean = (torch.softmax(scaled, dim=-1) * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1)
        entropy = normaliser - mean
    at = None if at_ids is None else scaled.gather(-1, at_ids) - normaliser[:, None]
    likeliest = scaled.detach()[:, :among].topk(top, dim=-1).indices if top else None
    if at_ids is None and likeliest is not None:
        at = (scaled.gather(-1, likeliest) - normaliser[:, None]).detach()
    return Scores(chosen - normaliser, entropy, at, likeliest)


def score_hidden(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    temperature: float,
    vocabulary: int,
    chunk_bytes: int,
    entropy_gradient: bool = False,
    top: int = 0,
    at_ids: torch.Tensor | None = None,
    among: int | None = None,
) -> Scores:
    """Scores of `project(hidden)`, as `score_logits`, in at most `chunk_bytes` of logits and what is made of them.

    hidden [N, H], targets [N] int64, at_ids [N, k] int64. Where one chunk does not suffice, each is computed again in
    the backward pass.
    """
    rows = max(1, chunk_bytes // (BUFFERS * wide(hidden[:0]).element_size() * vocabulary))

    def chunk(part: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor | None) -> Scores:
        given: dict[str, Any] = {"entropy_gradient": entropy_gradient, "top": top, "at_ids": ids, "among": among}
        return score_logits(project(part), wanted, temperature, **given)

    if len(targets) <= rows:
        return chunk(hidden, targets, at_ids)
    starts = range(0, len(targets), rows)
    parts = [
        (hidden[s : s + rows], targets[s : s + rows], None if at_ids is None else at_ids[s : s + rows]) for s in starts
    ]
    if torch.is_grad_enabled():
        scores = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    else:
        scores = [chunk(*part) for part in parts]
    return Scores(
        torch.cat([s.logprobs for s in scores]),
        torch.cat([s.entropy for s in scores]),
        None if at_ids is None and not top else torch.cat([s.at for s in scores if s.at is not None]),
        torch.cat([s.top for s in scores if s.top is not None]) if top else None,
    )


BUFFERS = 5
"""[rows, V] tensors that `score_logits` and its backward pass hold at once."""
