"""Sums, means and maxima over the trained tokens of each trajectory, broadcast to those tokens (pure torch).

A trajectory of several training sequences counts here as several trajectories. A micro-batch holds whole sequences,
so these need nothing from other micro-batches or ranks. The numbers of trajectories may be any integers. The gradient
is that of the sum or mean; where `mask` is False the result is 0.
"""

from __future__ import annotations

import torch

from learner.algorithms.kl.estimators import cut


def segment_sum(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [N]: at each token the sum of `values` [N] over its trajectory (`trajectory` [N] int64, `mask` [N]
    bool)."""
    number, count = _numbered(trajectory)
    values = cut(values, mask)
    return cut(values.new_zeros(count).index_add(0, number, values)[number], mask)


def segment_count(trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [N] float64: at each token the number of unmasked tokens of its trajectory."""
    return segment_sum(mask.double(), trajectory, mask)


def segment_mean(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [N]: at each token the mean of `values` [N] over the unmasked tokens of its trajectory."""
    return segment_sum(values, trajectory, mask) / segment_count(trajectory, mask).clamp(min=1).to(values.dtype)


def segment_max(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [N]: at each token the largest of `values` [N] in its trajectory; a constant."""
    number, count = _numbered(trajectory)
    held = cut(values.detach(), mask, -torch.inf)
    largest = held.new_full((count,), -torch.inf).scatter_reduce(0, number, held, "amax")
    return cut(largest[number], mask)


def _numbered(trajectory: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return each token's trajectory as an index from 0, and the number of trajectories."""
    ids, number = torch.unique(trajectory, return_inverse=True)
    return number, len(ids)
