"""The divergence as part of the reward (pure torch); not to be combined with one in the loss."""

from __future__ import annotations

import torch

from learner.kl.masked import cut


def penalised(rewards: torch.Tensor, kl: torch.Tensor, coefficient: float, mask: torch.Tensor) -> torch.Tensor:
    """[N] rewards - coefficient * kl of each token, a constant; 0 where `mask` is False.

    rewards [N] what each token earned (the outcome stands on a trajectory's last token), kl [N] an estimate whose
    expected value is the divergence, k1 as a rule (verl's `apply_kl_penalty`; InstructGPT, arXiv 2203.02155).
    """
    return cut(rewards.detach(), mask) - coefficient * cut(kl.detach(), mask)
