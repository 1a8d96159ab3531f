"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (pure torch).

With x = log reference - log policy of the sampled token (clamped to +-20), w = e^x = reference / policy, and
r = policy / sg(policy), which is 1 and has the gradient of log policy. Expectations are over tokens drawn from the
policy; "reverse" is KL(policy || reference), "forward" is KL(reference || policy).

kind   value                expected value    expected gradient                                source
k1     -x                   reverse           0: useless as a loss, good in a reward           Schulman 2020
k2     x^2 / 2              E[x^2] / 2        reverse                                          Schulman 2020
k3     w - x - 1            reverse, >= 0     forward                                          Schulman 2020
abs    |x|                  E|x|              sum over tokens of |policy - reference|          verl
k1+    -x                   reverse           reverse (the gradient is k2's, straight-through) verl
k3+    w - x - 1            reverse, >= 0     reverse (the gradient is k2's, straight-through) verl
k3++   r (w - x - 1)        reverse, >= 0     reverse                                          EMA-PG, arXiv 2602.04417
k4     r sg(-x)             reverse           reverse (as k1+)                                 EMA-PG
k5     sg(w) x + log r      forward           forward                                          EMA-PG

(John Schulman, "Approximating KL divergence", 2020.)

The value of the exponential kinds is capped at 10 (`CAP`), as in verl, OpenRLHF, Search-R1 and slime's low_var_kl:
k3, k3++ and k5 have no gradient beyond (k3: x > 2.61 or x < -11.0; k5: x > 1.75), so that the table's expectations are
those of tokens below the cap. k3+ keeps k2's gradient there, |x| <= 20, as in verl. EMA-PG caps k3++ but pushes such
tokens down with a force of 10, and leaves k5 uncapped.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

CAP = 10.0
"""Largest exponential estimate of a divergence at one token, and largest importance weight on it: e^20 at one token
would dominate the gradient of a batch. verl, OpenRLHF and Search-R1 also cap k3 at 10."""

LOG_RATIO_LIMIT = 20.0
"""e^20 = 5e8: beyond it a ratio would overflow, and only means that the policies have nothing in common."""


def require_mask(mask: torch.Tensor) -> None:
    """Raise TypeError unless `mask` is bool: an int or float mask has another meaning as an index or a condition."""
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask must have dtype torch.bool, not {mask.dtype}")


def cut(values: torch.Tensor, mask: torch.Tensor, instead: float = 0.0) -> torch.Tensor:
    """Return `values` where `mask` is True, `instead` elsewhere; no gradient reaches masked values.

    A masked position may contain anything, NaN included, so losses and divergences cut it before computing from it: a
    product with a mask would leak NaN into the value, and a mask applied last would leak it into the gradient.
    `mask` is bool and has the shape of `values`; raises TypeError or ValueError otherwise.
    """
    require_mask(mask)
    if values.shape != mask.shape:
        raise ValueError(f"values of shape {tuple(values.shape)} do not fit a mask of shape {tuple(mask.shape)}")
    return torch.where(mask, values, instead)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return `log_ratio` clamped to +-20; the gradient is 0 beyond."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def capped(estimate: torch.Tensor) -> torch.Tensor:
    """Return `estimate` capped at `CAP`; the gradient is 0 beyond."""
    return estimate.clamp(max=CAP)


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log(policy / old) clamped to +-20 (gradient 0 beyond), and 0 where `mask` is False."""
    return clamped(cut(logprobs - old, mask))


KlKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "k3++", "k4", "k5"]

_DIFFERENTIATED = ("k1", "k3", "abs")
"""Kinds whose importance ratio carries a gradient; in the others the gradient is already that of an expectation."""


def kl_estimate(
    policy: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    kind: KlKind,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the estimate per token, of the shape of `policy` and `reference` (log-probs); 0 where `mask` is False.

    importance  log-probs of the policy that drew the tokens, a constant, where that was not `policy`. The estimate is
                multiplied by exp(clamp(policy - importance)), so that expectations over the drawn tokens are those of
                the table. For k1, k3 and abs the ratio carries a gradient, which is then that of the expected value:
                k1 and k3 estimate the gradient of the reverse divergence without bias (DeepSeek-V3.2, arXiv
                2512.02556; TRL's `use_bias_correction_kl`). For the other kinds it is a constant: their gradient
                already is that of an expectation, and would count twice. The ratio is capped at 10; beyond, k1, k3
                and abs have no gradient.

    Masked positions are cut before anything is computed, so a NaN or infinity there reaches neither the value nor
    the gradient. x is clamped to +-20, where the gradient is 0. The reference is a constant. Raises TypeError for a
    mask that is not bool, ValueError for an unknown kind or shapes that differ.
    """
    x = clamped(cut(reference.detach() - policy, mask))
    estimate = _value(x, kind)
    if importance is None:
        return estimate
    ratio = log_ratio(policy, importance.detach(), mask).exp()
    if kind not in _DIFFERENTIATED:
        return estimate * capped(ratio.detach())
    # The capped ratio's gradient is 0, and the rest of the product's would point the wrong way.
    return torch.where(ratio > CAP, (CAP * estimate).detach(), estimate * ratio)


def _value(x: torch.Tensor, kind: KlKind) -> torch.Tensor:
    fixed = x.detach()
    move = fixed - x  # 0, with the gradient of log policy
    if kind == "k1":
        return -x
    if kind == "k2":
        return 0.5 * x.square()
    if kind == "k3":
        return capped(_k3(x))
    if kind == "abs":
        return x.abs()
    if kind in ("k1+", "k4"):
        return -fixed * (1 + move)
    if kind == "k3+":
        return capped(_k3(fixed)) - fixed * move
    if kind == "k3++":
        return capped(move.exp() * _k3(x))
    if kind == "k5":
        return capped(fixed.exp() * x + move)
    raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(get_args(KlKind))}")


def _k3(x: torch.Tensor) -> torch.Tensor:
    # expm1 keeps the digits that e^x - 1 loses near 0, where policies usually are
    return torch.expm1(x) - x


def penalised(rewards: torch.Tensor, kl: torch.Tensor, coefficient: float, mask: torch.Tensor) -> torch.Tensor:
    """Return [N]: rewards - coefficient * kl of each token, a constant; 0 where `mask` is False.

    rewards [N] reward of each token (the outcome is at a trajectory's last token), kl [N] an estimate whose
    expected value is the divergence, normally k1 (verl's `apply_kl_penalty`; InstructGPT, arXiv 2203.02155). Do not
    combine with a divergence in the loss.
    """
    return cut(rewards.detach(), mask) - coefficient * cut(kl.detach(), mask)
