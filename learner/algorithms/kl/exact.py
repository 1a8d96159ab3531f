"""Divergences from the k most likely tokens and the sampled one, with the gradient of the full divergence (pure torch).

The head, k tokens chosen without regard to the sampled one, is summed exactly with un-renormalised probabilities. The
tail is estimated by the sampled token, which counts only where it fell outside the head. Over tokens drawn from the
policy both the value and the gradient have exactly the expectation of the full divergence, for every k: k = 0 is the
sampled estimator, k = V the full sum.

EMA-PG (arXiv 2602.04417) has the same head, but its tail is r sg(log p/q) (reverse) and sg(w) log w + log r (forward):
right where the head is empty or whole, and biased between. Differentiating the reverse head gives
sum_head (log p/q + 1) grad p, whose "+ 1" only vanishes when it is summed over the whole vocabulary, so the tail must
bring its share; and log r, whose gradient vanishes over the whole vocabulary, does not over the tail alone.
"""

from __future__ import annotations

import torch

from learner.algorithms.kl.estimators import capped, clamped, cut, log_ratio, require_mask


def topk_reverse_kl(
    policy_head: torch.Tensor,
    reference_head: torch.Tensor,
    policy: torch.Tensor,
    reference: torch.Tensor,
    inside: torch.Tensor,
    mask: torch.Tensor,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [N] estimates of KL(policy || reference): sum_head p (log p - log q) + 1[outside] (r (sg(log p/q) + 1) -
    1).

    policy_head     [N, k] the policy's log-probs of the head's tokens, normalised over the whole vocabulary, with
                    gradient. The head is best the top k of the policy before the update
    reference_head  [N, k] the reference's log-probs of the same tokens
    policy          [N] log-probs of the sampled token under the policy, with gradient
    reference       [N] the same under the reference
    inside          [N] bool, whether the sampled token is in the head
    mask            [N] bool
    importance      [N] log-probs of the sampled token under the policy that drew it, where that was not `policy`:
                    the tail, and only it, is multiplied by the constant exp(policy - importance), at most 10; the
                    head needs no correction, since none of it was sampled

    r = p / sg(p). Log-ratios are clamped to +-20. 0 where `mask` is False. Raises TypeError or ValueError for bad
    shapes or dtypes.
    """
    _require(policy_head, reference_head, inside, mask)
    counts = mask[:, None] & (policy_head.detach() != -torch.inf)
    log_p = torch.where(counts, policy_head, -torch.inf)
    head = log_p.exp() * clamped(torch.where(counts, policy_head - reference_head.detach(), 0.0))
    gap = log_ratio(policy, reference.detach(), mask & ~inside)
    fixed = gap.detach()
    tail = fixed + (fixed + 1) * torch.expm1(gap - fixed)
    return head.sum(-1) + tail * _drawn(policy, importance, mask & ~inside)


def topk_forward_kl(
    policy_head: torch.Tensor,
    reference_head: torch.Tensor,
    policy: torch.Tensor,
    reference: torch.Tensor,
    inside: torch.Tensor,
    mask: torch.Tensor,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [N] estimates of KL(reference || policy): sum_head q (log q - log p) + 1[outside] sg(q/p) log(q/p).

    Arguments as of `topk_reverse_kl`; the head is best the reference's top k. The tail is capped at 10, as k5 is.
    """
    _require(policy_head, reference_head, inside, mask)
    fixed_head = reference_head.detach()
    counts = mask[:, None] & (fixed_head != -torch.inf)
    log_q = torch.where(counts, fixed_head, -torch.inf)
    head = log_q.exp() * clamped(torch.where(counts, fixed_head - policy_head, 0.0))
    x = -log_ratio(policy, reference.detach(), mask & ~inside)
    tail = capped(x.detach().exp() * x)
    return head.sum(-1) + tail * _drawn(policy, importance, mask & ~inside)


def _drawn(policy: torch.Tensor, importance: torch.Tensor | None, outside: torch.Tensor) -> torch.Tensor | float:
    """Return the importance weight policy / sampler of the sampled token; a constant."""
    if importance is None:
        return 1.0
    return cut(capped(log_ratio(policy.detach(), importance.detach(), outside).exp()), outside)


def _require(policy_head: torch.Tensor, reference_head: torch.Tensor, inside: torch.Tensor, mask: torch.Tensor) -> None:
    require_mask(mask)
    require_mask(inside)
    if policy_head.shape != reference_head.shape or policy_head.shape[:1] != mask.shape:
        shapes = [tuple(t.shape) for t in (policy_head, reference_head, mask)]
        raise ValueError(f"the head's log-probs and the mask do not fit: {shapes}")
