"""The proximal policy of decoupled PPO without a forward pass of its own (pure torch)."""

from __future__ import annotations

from typing import Literal

import torch

from learner.kl import cut


def proximal_interpolated(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    lags: torch.Tensor,
    mask: torch.Tensor,
    *,
    method: Literal["loglinear", "linear"] = "loglinear",
) -> torch.Tensor:
    """[N] log-probs between those of the behaviour policy and the one being trained, a constant; 0 where masked.

    loglinear  (1 - alpha) log b + alpha log p
    linear     log((1 - alpha) b + alpha p)
    with alpha = lag / (lag + 1), and `behaviour` itself, digit for digit, where the lag is 0.

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
