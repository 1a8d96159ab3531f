"""Policy losses and the entropy bonus, from log-probs of sampled tokens (pure torch).

clipped_surrogate       the ratio of each token, clipped (PPO)
gspo, gmpo              the ratio of a whole trajectory. Both average over a trajectory's tokens: aggregate them as
                        seq_mean_token_mean to get what the papers state
reinforce, cispo, sapo  weight grad log policy instead of clipping it
proximal_interpolated   the proximal policy of decoupled PPO without another forward pass

All take [N] tensors, in which `old`, `advantages` and values derived from them alone are constants. They give loss 0
and no gradient where `mask` is False or the advantage is 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from learner.algorithms.kl.estimators import cut, log_ratio
from learner.algorithms.losses.segments import segment_mean

__all__ = ["Surrogate", "clip_gain", "clipped_surrogate", "log_ratio", "plain", "weighted_sum"]


class Surrogate(NamedTuple):
    """Result of every policy loss per token, [N]; 0 and False where masked.

    loss          to be minimised; the only one with a gradient
    ratio         to the proximal policy, or the trajectory's ratio where the method uses that
    clipped       whether a bound on the ratio is active (verl's `pg_clipfrac`): clipped_low or clipped_high
    clipped_low   below the lower bound, if that is active: in PPO only for a negative advantage
    clipped_high  above the upper bound, if that is active: in PPO only for a positive advantage
    clipped_dual  whether the dual clip is active (verl's `pg_clipfrac_lower`)
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor


def clip_gain(
    ratio: torch.Tensor, gain: torch.Tensor, mask: torch.Tensor, *, low: float, high: float, dual: float | None = None
) -> Surrogate:
    """Return PPO's clip of `ratio` (finite, with gradient) under advantages `gain` (constants, 0 where masked).

    Raises ValueError if the dual clip is not above 1: it would be active for equal policies.
    """
    if dual is not None and dual <= 1:
        raise ValueError(f"the dual clip bounds a ratio that has grown, so it must be above 1, not {dual}")
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - low, 1 + high))
    fixed = ratio.detach()
    below = mask & (gain < 0) & (fixed < 1 - low)
    above = mask & (gain > 0) & (fixed > 1 + high)
    beyond = torch.zeros_like(mask)
    if dual is not None:
        beyond = mask & (gain < 0) & (fixed > dual)
        loss = torch.where(beyond, -gain * dual, loss)
    return Surrogate(loss, cut(fixed, mask), below | above, below, above, beyond)


def plain(loss: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor) -> Surrogate:
    """Return a loss without clipping; `ratio` is only reported."""
    never = torch.zeros_like(mask)
    return Surrogate(cut(loss, mask), cut(ratio.detach(), mask), never, never, never, never)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Surrogate:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)) per token, to be minimised, with r = policy / old.

    PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476). With `dual`, where A < 0 the
    loss is at most -dual A (arXiv 1912.09729; there 3). Gradient: -A r grad log policy, and 0 where the
    clip is active. `old` and `advantages` are constants. All [N]; masked positions get loss 0 and pass no gradient.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    return clip_gain(ratio, cut(advantages.detach(), mask), mask, low=low, high=high, dual=dual)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of values * weights where `mask` is True, as a scalar; masked values and weights may be NaN.

    An empty sum is a 0 that still has a graph: every rank must run its backward pass.
    """
    return (cut(values, mask) * cut(weights, mask)).sum()


def entropy_sum(entropy: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a scalar: entropies [N] (nats, at the sampling temperature) times `weights` [N]; subtract it from the
    loss.

    With the weights of the policy loss the bonus is aggregated as that loss is.
    """
    return weighted_sum(entropy, weights, mask)


def proximal_interpolated(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    lags: torch.Tensor,
    mask: torch.Tensor,
    *,
    method: Literal["loglinear", "linear"] = "loglinear",
) -> torch.Tensor:
    """Return [N] log-probs between those of the behaviour policy and the one being trained, a constant; 0 where masked.

    loglinear  (1 - alpha) log b + alpha log p
    linear     log((1 - alpha) b + alpha p)
    with alpha = lag / (lag + 1), and `behaviour` itself, bit for bit, where the lag is 0.

    logprobs [N] of the policy being trained, behaviour [N] when they were sampled, lags [N] int64 steps between the
    version that sampled the token and the one being trained. AReaL (`prox_logp_method`) writes
    alpha = (v - 1 - v_b) / (v - v_b) for a token sampled by version v_b, where v is the version that the step makes:
    v = v_b + lag + 1, since at lag 0 the policy being trained is the one that sampled. The proximal policy is then the
    one before the update, lag steps along the lag + 1 from v_b to v. A negative lag counts as 0. Raises ValueError for
    an unknown method.
    """
    policy, fixed = cut(logprobs.detach(), mask), cut(behaviour.detach(), mask)
    steps = cut(lags, mask).to(policy.dtype)
    alpha = steps / (steps + 1)
    if method == "loglinear":
        between = fixed + alpha * (policy - fixed)
    elif method == "linear":
        between = torch.logaddexp(torch.log1p(-alpha) + fixed, torch.log(alpha) + policy)
    else:
        raise ValueError(f"unknown method {method!r}; known: loglinear, linear")
    return torch.where(steps > 0, between, fixed)


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
    """Return max(-A s, -A clip(s, 1 - low, 1 + high)) per token, with s = sg(s_i) policy / sg(policy).

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
    """Return -A exp(mean over the trajectory of clipped log-ratios) per token.

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


def reinforce(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Surrogate:
    """Return -A log policy per token; gradient -A grad log policy, whichever policy sampled the tokens.

    REINFORCE (Williams 1992), and GPG (arXiv 2504.02546), which is this loss with its own advantages. `old` is used for
    the reported ratio only.
    """
    ratio = log_ratio(logprobs.detach(), old, mask).exp()
    return plain(_log_policy(logprobs, advantages, mask, torch.ones_like(ratio)), ratio, mask)


def cispo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lower: float,
    upper: float,
) -> Surrogate:
    """Return -sg(clip(r, lower, upper)) A log policy per token, with r = policy / old.

    CISPO (MiniMax-M1, arXiv 2506.13585): unlike in PPO a clipped token keeps a gradient,
    -clip(r) A grad log policy. `lower` and `upper` bound the ratio itself: the paper's and verl's epsilons are
    lower = 1 - epsilon_low (0 for none), upper = 1 + epsilon_high; TRL's `epsilon_high` is `upper` itself (5 there).
    Clip fractions count both bounds for either sign of A. Raises ValueError if lower > upper.
    """
    if not 0 <= lower <= upper:
        raise ValueError(f"bounds of a ratio must be 0 <= lower <= upper, not {lower} and {upper}")
    ratio = log_ratio(logprobs.detach(), old, mask).exp()
    loss = _log_policy(logprobs, advantages, mask, ratio.clamp(lower, upper))
    below, above = mask & (ratio < lower), mask & (ratio > upper)
    return Surrogate(loss, cut(ratio, mask), below | above, below, above, torch.zeros_like(mask))


def sapo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """Return -A sigmoid(tau (r - 1)) 4 / tau per token, with r = policy / old; tau_positive where A > 0.

    Soft adaptive policy optimisation (Qwen, arXiv 2511.20347): a gate instead of a clip. Gradient:
    -A 4 p (1 - p) r grad log policy with p = sigmoid(tau (r - 1)), which is REINFORCE's at r = 1 and fades on both
    sides, faster for the larger tau.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    gain = cut(advantages.detach(), mask)
    tau = torch.where(gain > 0, torch.full_like(gain, tau_positive), tau_negative)  # two scalars would give float32
    return plain(-gain * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio, mask)


def _log_policy(
    logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return -weight A log policy, finite even if a log-prob is infinite and its advantage 0."""
    gain = cut(advantages.detach(), mask)
    return -weight.detach() * gain * cut(logprobs, mask & (gain != 0))
