"""Policy losses whose ratio is that of a whole trajectory (pure torch).

Both are means over a trajectory's tokens, so aggregate them as seq_mean_token_mean to get what the papers state.
"""

from __future__ import annotations

import torch

from learner.kl import cut, log_ratio
from learner.losses.segments import segment_mean
from learner.losses.surrogate import Surrogate, clip_gain


def gspo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    trajectory: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) for each token, with s = sg(s_i) policy / sg(policy).

    GSPO-token (Qwen, arXiv 2507.18071; there low 3e-4, high 4e-4), where
    s_i = exp(mean over the trajectory of log(policy / old)) is the geometric mean of its tokens' ratios. Gradient:
    -A s_i grad log policy of each token, 0 for the whole trajectory where s_i is clipped. Where a trajectory has one
    advantage its mean over tokens equals GSPO in value and gradient. Each token's log-ratio is clamped to
    +-20 (no gradient beyond), so s_i is finite. All [N]; `ratio` is s_i.
    """
    gap = log_ratio(logprobs, old.detach(), mask)
    fixed = gap.detach()
    ratio = (segment_mean(fixed, trajectory, mask) + gap - fixed).exp()
    return clip_gain(ratio, cut(advantages.detach(), mask), mask, low=low, high=high)


def gmpo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    trajectory: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """-A exp(mean over the trajectory of clipped log-ratios) for each token.

    Geometric-mean policy optimisation (arXiv 2507.20673): a token's log-ratio x becomes
    min(x, clip(x, -low, high)) where A > 0 and max(x, clip(x, -low, high)) where A < 0, bounds on the *log*-ratio (the
    paper's 0.4 and 0.4, i.e. ratios in [e^-0.4, e^0.4]). Gradient of the trajectory's mean: -A s_i times the mean of
    grad log policy over its tokens that are not clipped (verl's `geo_mean`). A is the trajectory's mean advantage. All
    [N]; `ratio` is the trajectory's, after the clip.
    """
    gap = log_ratio(logprobs, old.detach(), mask)
    gain = segment_mean(advantages.detach(), trajectory, mask)
    below, above = (gain < 0) & (gap.detach() < -low), (gain > 0) & (gap.detach() > high)
    bounded = torch.where(below | above, gap.detach().clamp(-low, high), gap)
    ratio = segment_mean(bounded, trajectory, mask).exp()
    return Surrogate(-gain * ratio, cut(ratio.detach(), mask), below | above, below, above, torch.zeros_like(mask))
