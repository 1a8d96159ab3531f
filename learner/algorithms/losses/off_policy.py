"""Corrections for tokens sampled by another policy than the proximal one (pure torch): one constant per token.

Everything starts from log_weight [N] = `log_ratio(old, behaviour, mask)`, log of the importance weight w =
proximal / behaviour, clamped to +-20. Bounds are always bounds on w. (verl's k1 rejection bounds
behaviour / proximal, the inverse: its [a, b] is [1/b, 1/a] here.)

A loss whose own ratio already divides by the behaviour policy must not be corrected again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from learner.algorithms.kl.estimators import clamped, cut
from learner.algorithms.losses.segments import segment_count, segment_max, segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
Measure = Literal["ratio", "k2", "k3"]
RejectionLevel = Literal["token", "sequence", "geometric", "mean", "max"]


def at_level(log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, level: Level) -> torch.Tensor:
    """Return [N] log-weights of tokens, or of each token's trajectory; constants within +-20, 0 where masked.

    token      log w of the token
    sequence   sum over the trajectory's tokens: the trajectory's importance weight
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
    """Return [N]: clip(w, low, high) at `level`; 0 where masked.

    Truncated importance sampling (Ionides 2008; TIS of verl and slime with low 0 and high 2 at token level).
    """
    _require_bounds(low, high)
    return cut(at_level(log_weight, trajectory, mask, level).exp().clamp(low, high), mask)


def masked(
    log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, *, level: Level, low: float, high: float
) -> torch.Tensor:
    """Return [N]: w at `level` where low <= w <= high, else 0; 0 where masked.

    Masked importance sampling (TRL's `sequence_mask`, high 3) and, at token level, IcePop (Ring-1T, arXiv 2510.18855,
    0.5 to 5): weights too far outside are not trusted at all. Zeroed tokens still count in denominators.
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
    low: float = 0.0,
    high: float,
    measure: Measure = "ratio",
) -> torch.Tensor:
    """Return [N] bool: tokens that survive rejection; always False where `mask` is False.

    measure ratio: low <= w <= high

    token, sequence, geometric  at that level (`at_level`)
    max                         for every token of the trajectory

    measure k2 (log(w)^2 / 2) or k3 (w - log w - 1), both 0 where the policies agree: at most `high`; `low` is ignored

    token      of the token
    sequence   summed over the trajectory's tokens (verl's `seq_sum_k2`, `seq_sum_k3`)
    mean       their mean (verl's `seq_mean_k3`, AReaL's `kl_k3`): unlike in a geometric mean of ratios, tokens that
               grew do not make up for tokens that shrank
    max        the largest of them (verl's `seq_max_k2`, `seq_max_k3`)

    Raises ValueError if low > high, or if the measure has no such level.
    """
    if measure != "ratio":
        return mask & (_divergence_at(log_weight, trajectory, mask, level, measure) <= high)
    _require_bounds(low, high)
    if level == "max":
        weight = at_level(log_weight, trajectory, mask, "token").exp()
        outside = ~((low <= weight) & (weight <= high))
        return mask & (segment_max(outside.double(), trajectory, mask) == 0)
    if level == "mean":
        raise ValueError("level mean does not apply to ratios: use level geometric, or measure k2 or k3")
    weight = at_level(log_weight, trajectory, mask, level).exp()
    return mask & (low <= weight) & (weight <= high)


def _divergence_at(
    log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, level: RejectionLevel, measure: Measure
) -> torch.Tensor:
    x = at_level(log_weight, trajectory, mask, "token")
    values = 0.5 * x.square() if measure == "k2" else torch.expm1(x) - x
    if level == "token":
        return values
    if level == "sequence":
        return segment_sum(values, trajectory, mask)
    if level == "mean":
        return segment_mean(values, trajectory, mask)
    if level == "max":
        return segment_max(values, trajectory, mask)
    raise ValueError(f"measure {measure} has no level {level!r}; it has: token, sequence, mean, max")


def veto(log_weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """Return [N] bool: tokens of trajectories in which no token has w < threshold (verl and slime: 1e-4 or so).

    A token that the proximal policy would hardly have sampled marks its whole trajectory as off-policy.
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
    """Return [N] bool: False where A < 0 and the trajectory's mean of log(behaviour / policy) exceeds `delta` (nats).

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): do not train on mistakes that the policy would no
    longer make. Tokens with A >= 0 are always kept.
    """
    drift = segment_mean(clamped(cut(behaviour.detach() - logprobs.detach(), mask)), trajectory, mask)
    return mask & ~((cut(advantages.detach(), mask) < 0) & (drift > delta))


class WeightSums(NamedTuple):
    """Sums over tokens or trajectories, 0-d float64 each, to be added over micro-batches and ranks: w, w squared,
    count.
    """

    total: torch.Tensor
    squares: torch.Tensor
    number: torch.Tensor


def weight_sums(weight: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor, *, level: Level) -> WeightSums:
    """Return the sums of one micro-batch's weights [N] at `level`, where `mask` is True: over tokens at level token,
    else over trajectories, whose tokens share one weight.
    """
    w = cut(weight.detach(), mask).double()
    once = mask.double()
    if level != "token":
        once = once / segment_count(trajectory, mask).clamp(min=1)
    return WeightSums((w * once).sum(), (w.square() * once).sum(), once.sum())


def normalised(weight: torch.Tensor, mask: torch.Tensor, sums: WeightSums) -> torch.Tensor:
    """Return [N] weights divided by their mean over the whole batch (`sums`); 0 where masked or if all weights are 0.

    Self-normalised importance sampling: the correction moves weight between tokens, or between trajectories (verl and
    slime likewise), but not the learning rate.
    """
    factor = torch.where(sums.total > 0, sums.number / sums.total, 0.0)
    return cut(weight.detach(), mask) * factor.to(weight)


def effective_sample_size(sums: WeightSums) -> float:
    """Return (sum w)^2 / sum w^2: the number of on-policy tokens with the same information (Kong 1992).

    From 1 to the number of tokens; 0 if every weight is 0. Divide by `sums.number` for the share.
    """
    squares = float(sums.squares)
    return float(sums.total) ** 2 / squares if squares > 0 else 0.0


def _require_bounds(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"bounds of an importance weight must be 0 <= low <= high, not {low} and {high}")
