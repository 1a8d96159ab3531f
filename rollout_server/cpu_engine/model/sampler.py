"""Sample tokens and log-probs from logits, for all rows at once.

Each request samples by inverting its distribution at a uniform number that is a pure function of (seed, position).
There is no generator state, so the result does not depend on other requests in the batch or on retractions.
Reported log-probs are log softmax(logits / T), not renormalised for top-k, top-p or min-p, as in SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

SHORT = 1024
"""Number of most likely tokens of a row that are sorted first: nearly always more than the filters leave."""
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of B rows, as arrays [B]. `top_k` 1 is greedy; a very large `top_k` has no effect."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: U64
    position: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleOutput:
    """tokens int64 [B], logprobs float32 [B] (NaN if the logits were not finite), all_logprobs float32 [B, V]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    all_logprobs: torch.Tensor


def sample(logits: torch.Tensor, rules: SamplingBatch) -> SampleOutput:
    """Sample one token per row of `logits` (float32 [B, V]). May overwrite `logits`."""
    if (rules.temperature != 1).any():
        logits = logits.div_(torch.from_numpy(rules.temperature)[:, None])
    logprobs = torch.log_softmax(logits, -1)
    greedy = rules.top_k == 1
    if greedy.all():
        tokens = logprobs.argmax(-1)
    else:
        at = torch.from_numpy(uniform(rules.seed, rules.position))
        tokens = invert(logprobs.exp(), at)
        filtered = ~greedy & ((rules.top_k < logits.shape[1]) | (rules.top_p < 1) | (rules.min_p > 0))
        if filtered.any():
            rows = torch.from_numpy(np.flatnonzero(filtered))
            tokens[rows] = _filtered(logprobs[rows].exp(), at[rows], rules, filtered)
        if greedy.any():
            rows = torch.from_numpy(np.flatnonzero(greedy))
            tokens[rows] = logprobs[rows].argmax(-1)
    return SampleOutput(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def invert(weights: torch.Tensor, at: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Invert the cumulative distribution of `weights` (>= 0, [B, V]) at `at` (in [0, 1), [B]). Return int64 [B].

    Sums in `dtype`, by default float64 for more than 4096 weights. Never returns an index with weight zero: the target
    is below the total, and the first index beyond the target has a positive weight.
    """
    cumulated = weights.cumsum(-1, dtype=dtype or _sum_dtype(weights.shape[1]))
    total = cumulated[:, -1:]
    target = torch.minimum(at[:, None].to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _filtered(
    probs: torch.Tensor, at: torch.Tensor, rules: SamplingBatch, chosen: npt.NDArray[np.bool_]
) -> torch.Tensor:
    """Sample from the tokens that remain after top-k, top-p and min-p, in that order."""
    vocab = probs.shape[1]
    top_k = torch.from_numpy(rules.top_k[chosen])[:, None]
    top_p = torch.from_numpy(rules.top_p[chosen])[:, None]
    min_p = torch.from_numpy(rules.min_p[chosen])[:, None]
    tokens, left = torch.empty(len(probs), dtype=torch.int64), torch.arange(len(probs))
    for size in (min(SHORT, vocab), vocab):
        rows = probs[left]
        ordered, index = rows.topk(size) if size < vocab else rows.sort(dim=-1, descending=True)
        drop = torch.arange(size) >= top_k[left]
        drop |= ordered.cumsum(-1) - ordered > top_p[left]
        drop |= ordered < min_p[left] * ordered[:, :1]
        drop[:, 0] = False
        # all tokens after a dropped one are dropped too
        done = drop[:, -1] if size < vocab else torch.ones(len(left), dtype=torch.bool)
        places = invert(ordered[done].masked_fill_(drop[done], 0), at[left[done]], _sum_dtype(vocab))
        tokens[left[done]] = index[done].gather(1, places[:, None])[:, 0]
        left = left[~done]
        if not len(left):
            break
    return tokens


def _sum_dtype(vocab: int) -> torch.dtype:
    return torch.float64 if vocab > 4096 else torch.float32


def uniform(seed: U64, position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return float32 [B] in [0, 1): the top 24 bits of splitmix64 (Steele, Lea, Flood 2014) of seed and position."""
    x = mix(seed + np.uint64(0x9E3779B97F4A7C15) * (position.astype(np.uint64) + np.uint64(1)))
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def mix(x: U64) -> U64:
    """Apply splitmix64's finaliser, a bijection on 64-bit numbers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
