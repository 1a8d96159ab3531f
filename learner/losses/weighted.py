"""Policy losses that weigh grad log policy instead of clipping it away (pure torch).

All take [N] tensors, of which `old`, `advantages` and whatever is made of them alone are constants, and give loss 0 and
no gradient where `mask` is False or the advantage is 0.
"""

from __future__ import annotations

import torch

from learner.kl import cut, log_ratio
from learner.losses.surrogate import Surrogate, plain


def reinforce(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Surrogate:
    """-A log policy for each token; gradient -A grad log policy, wherever the tokens came from.

    REINFORCE (Williams 1992), and GPG (arXiv 2504.02546), which is this loss with its own advantages. `old` is for the
    reported ratio alone.
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
    """-sg(clip(r, lower, upper)) A log policy for each token, with r = policy / old.

    CISPO (MiniMax-M1, arXiv 2506.13585): unlike in PPO a clipped token keeps a gradient,
    -clip(r) A grad log policy. `lower` and `upper` bound the ratio itself: the paper's and verl's epsilons are
    lower = 1 - epsilon_low (0 for none), upper = 1 + epsilon_high; TRL's `epsilon_high` is `upper` itself (5 there).
    Clip fractions count either bound whatever the sign of A. Raises ValueError for bounds the wrong way round.
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
    """-A sigmoid(tau (r - 1)) 4 / tau for each token, with r = policy / old; tau_positive where A > 0.

    Soft adaptive policy optimisation (Qwen, arXiv 2511.20347): a gate instead of a clip. Gradient:
    -A 4 p (1 - p) r grad log policy with p = sigmoid(tau (r - 1)), which is REINFORCE's at r = 1 and fades on both
    sides, faster for the larger tau.
    """
    ratio = log_ratio(logprobs, old.detach(), mask).exp()
    gain = cut(advantages.detach(), mask)
    tau = torch.where(gain > 0, torch.full_like(gain, tau_positive), tau_negative)  # two numbers would be float32
    return plain(-gain * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio, mask)


def _log_policy(
    logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """-weight A log policy, also where a log-prob is infinite and its advantage 0."""
    gain = cut(advantages.detach(), mask)
    return -weight.detach() * gain * cut(logprobs, mask & (gain != 0))
