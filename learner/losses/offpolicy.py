"""Corrections for tokens that another policy than the proximal one drew (pure torch): constants, one for each token.

Everything starts from log_weight [N] = `log_ratio(old, behaviour, mask)`, log of the importance weight w =
proximal / behaviour, clamped to +-20. Bounds are always bounds on w. (verl's k1 rejection bounds
behaviour / proximal, the inverse: its [a, b] is [1/b, 1/a] here.)

A loss whose own ratio already divides by the behaviour policy must not be corrected again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from learner.kl import clamped, cut
from learner.losses.segments import segment_max, segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
RejectionLevel = Literal["token", "sequence", "geometric", "max"]


def at_level(log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    """[N] log-weights of tokens, or at each token that of its trajectory; a constant within +-20, 0 where masked.

    token      log w of the token
    sequence   sum over the trajectory's tokens: the trajectory's own importance weight
    geometric  mean over them: comparable between lengths, but biased
    """
    values = clamped(cut(log_weight.detach(), mask))
    if level == "token":
        return values
    if level == "sequence":
        return clamped(segment_sum(values, trajectory, mask))
    if level == "geometric":
        return segment_mean(values, trajectory, mask)
    raise ValueError(f"unknown level {level!r}; known: token, sequence, geometric")


def truncated(
    log_weight: torch.Tensor,
    trajectory: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level,
    low: float = 0.0,
    high: float,
) -> torch.Tensor:
    """[N] clip(w, low, high) at `level`; 0 where masked.

    Truncated importance sampling (Ionides 2008; TIS of verl and slime with low 0 and high 2 at token level).
    """
    _require_bounds(low, high)
    return cut(at_level(log_weight, trajectory, mask, level).exp().clamp(low, high), mask)


def masked(
    log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, *, level: Level, low: float, high: float
) -> torch.Tensor:
    """[N] w at `level` where low <= w <= high, else 0; 0 where masked.

    Masked importance sampling (TRL's `sequence_mask`, high 3) and, at token level, IcePop (Ring-1T, arXiv 2510.18855,
    0.5 to 5): what lies too far outside is not trusted at any weight. Zeroed tokens still count in denominators.
    """
    _require_bounds(low, high)
    weight = at_level(log_weight, trajectory, mask, level).exp()
    return cut(weight, mask & (low <= weight) & (weight <= high))


def keep_mask(
    log_weight: torch.Tensor,
    trajectory: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: RejectionLevel,
    low: float,
    high: float,
) -> torch.Tensor:
    """[N] bool: tokens that survive rejection, never one that `mask` leaves out.

    token, sequence, geometric  low <= w <= high at that level (`at_level`)
    max                         low <= w <= high for every token of the trajectory; with low = 1 / high it is a bound on
                                the largest |log w| (verl's `seq_max_k2`)
    """
    _require_bounds(low, high)
    if level == "max":
        weight = at_level(log_weight, trajectory, mask, "token").exp()
        outside = ~((low <= weight) & (weight <= high))
        return mask & (segment_max(outside.double(), trajectory, mask) == 0)
    weight = at_level(log_weight, trajectory, mask, level).exp()
    return mask & (low <= weight) & (weight <= high)


def veto(log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """[N] bool: tokens of trajectories of which no token has w < threshold (verl and slime: 1e-4 or so).

    One token that the proximal policy would hardly have drawn says that the trajectory is not its own.
    """
    return keep_mask(log_weight, trajectory, mask, level="max", low=threshold, high=torch.inf)


def opsm(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    trajectory: torch.Tensor,
    mask: torch.Tensor,
    *,
    delta: float,
) -> torch.Tensor:
    """[N] bool: False where A < 0 and the trajectory's mean of log(behaviour / policy) exceeds `delta` (nats).

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): do not learn from mistakes that the policy would no
    longer make. Tokens with A >= 0 always stay.
    """
    drift = segment_mean(clamped(cut(behaviour.detach() - logprobs.detach(), mask)), trajectory, mask)
    return mask & ~((cut(advantages.detach(), mask) < 0) & (drift > delta))


class WeightSums(NamedTuple):
    """Sums over tokens, 0-d float64 each, to be added over micro-batches and ranks: w, w squared, how many tokens."""

    total: torch.Tensor
    squares: torch.Tensor
    tokens: torch.Tensor


def weight_sums(weight: torch.Tensor, mask: torch.Tensor) -> WeightSums:
    """The sums of one micro-batch's weights [N] where `mask` holds."""
    w = cut(weight.detach(), mask).double()
    return WeightSums(w.sum(), w.square().sum(), mask.sum().double())


def normalised(weight: torch.Tensor, mask: torch.Tensor, sums: WeightSums) -> torch.Tensor:
    """[N] weights divided by their mean over the whole batch, of which `sums` are; 0 where masked or all weights are 0.

    Self-normalised importance sampling: the correction moves weight between tokens but not the learning rate.
    """
    factor = torch.where(sums.total > 0, sums.tokens / sums.total, 0.0)
    return cut(weight.detach(), mask) * factor.to(weight)


def effective_sample_size(sums: WeightSums) -> float:
    """(sum w)^2 / sum w^2: as many tokens drawn by the proximal policy itself would say as much (Kong 1992).

    From 1 to the number of tokens; 0 when every weight is 0. Divide by `sums.tokens` for the share.
    """
    squares = float(sums.squares)
    return float(sums.total) ** 2 / squares if squares > 0 else 0.0


def _require_bounds(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"bounds of an importance weight must be 0 <= low <= high, not {low} and {high}")
