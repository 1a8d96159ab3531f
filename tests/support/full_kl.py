"""Divergences over the whole vocabulary, from two tables of log-probs: what sampled and top-k estimators are held
against.
"""

from __future__ import annotations

import torch

from learner.algorithms.kl.estimators import require_mask


def full_reverse_kl(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] sum_v p_v (log p_v - log q_v), in nats, of log-softmaxed `policy` and `reference` [N, V], `mask` [N] bool.

    Differentiable in `policy`; the reference is a constant. A token of probability 0 adds nothing; one that only the
    reference forbids makes it infinite. Rows where `mask` is False give 0. Raises TypeError, ValueError.
    """
    log_p, log_q = _pair(policy, reference, mask, policy)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def full_forward_kl(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] sum_v q_v (log q_v - log p_v), of the same arguments as `full_reverse_kl`."""
    log_p, log_q = _pair(policy, reference, mask, reference)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _pair(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables, with equal entries wherever `weight` (log-probs) or the mask lets nothing count."""
    require_mask(mask)
    if policy.shape != reference.shape or policy.shape[:-1] != mask.shape:
        raise ValueError(f"shapes {tuple(policy.shape)}, {tuple(reference.shape)}, {tuple(mask.shape)} do not fit")
    counts = mask[..., None] & (weight.detach() != -torch.inf)
    return torch.where(counts, policy, 0.0), torch.where(counts, reference.detach(), 0.0)
