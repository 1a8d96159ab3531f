"""The entropy of the policy as part of the loss (pure torch)."""

from __future__ import annotations

import torch

from learner.losses.surrogate import weighted_sum


def entropy_sum(entropy: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scalar: entropies [N] (nats, at the sampling temperature) by `weights` [N]; to be subtracted from the loss.

    With the weights of the policy loss the bonus is aggregated as that loss is.
    """
    return weighted_sum(entropy, weights, mask)
