"""What is reported of every update, whatever the algorithm: the guards' numbers."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenInputs
from learner.algorithms.correction import Corrected
from learner.kl import kl_estimate, log_ratio
from learner.losses import Surrogate

AGES = 4
"""Losses are told apart by the tokens' lag, from 0 to AGES - 1; older ones count with the last."""

Scalars = dict[str, torch.Tensor]
Ratios = dict[str, tuple[torch.Tensor, torch.Tensor]]


def report(
    inputs: TokenInputs, surrogate: Surrogate, corrected: Corrected, values: torch.Tensor
) -> tuple[Scalars, Scalars, Ratios]:
    """(sums, maxima, ratios) of `LossOutput`.

    clip_fraction, clip_low, clip_high, clip_dual  share of tokens whose ratio was clipped, and at which bound
    ratio_mean, ratio_square, ratio_max            of the surrogate's ratio; the squares make the effective sample size
    entropy                                        nats a token
    kl_behaviour                                   k3 of the engines' policy against the learner's, at most 10 a token
    logprob_gap, logprob_gap_max                   |log-prob of the learner - that of the engine|
    rejected, weight_mean                          share of tokens left out; mean importance weight
    logprob_right, logprob_wrong                   mean log-prob of tokens in trajectories with and without reward: the
                                                   first must not sink
    loss_lag_0 ...                                 mean loss of tokens by their lag
    """
    mask, logprobs = inputs.mask, inputs.logprobs.detach()
    # What the trainer and the engines disagree on: staleness and the numerics of two programs.
    gap = log_ratio(logprobs, inputs.behaviour, mask).abs()
    sums = {
        "clip_fraction": surrogate.clipped.sum(),
        "clip_low": surrogate.clipped_low.sum(),
        "clip_high": surrogate.clipped_high.sum(),
        "clip_dual": surrogate.clipped_dual.sum(),
        "ratio_mean": surrogate.ratio.sum(),
        "ratio_square": surrogate.ratio.square().sum(),
        "entropy": torch.where(mask, inputs.entropy.detach(), 0.0).sum(),
        "kl_behaviour": kl_estimate(inputs.behaviour, logprobs, mask, "k3").sum(),
        "logprob_gap": gap.sum(),
        "rejected": (mask & ~corrected.kept).sum(),
        "weight_mean": torch.where(mask, corrected.weight, 0.0).sum(),
    }
    maxima = {"ratio_max": _largest(surrogate.ratio), "logprob_gap_max": _largest(gap)}
    right = mask & (inputs.outcome > 0)
    ratios = {
        "logprob_right": _mean(logprobs, right),
        "logprob_wrong": _mean(logprobs, mask & ~right),
    }
    ages = inputs.lags.clamp(0, AGES - 1)
    for age in range(AGES):
        ratios[f"loss_lag_{age}"] = _mean(values.detach(), mask & (ages == age))
    return sums, maxima, ratios


def _largest(values: torch.Tensor) -> torch.Tensor:
    """0 without any token: both maxima are of numbers that are not negative."""
    return values.max() if len(values) else values.new_zeros(())


def _mean(values: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.where(where, values, 0.0).sum(), where.sum()
