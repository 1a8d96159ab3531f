"""Sums, means and maxima over the trained tokens of each trajectory, given back to each of them (pure torch).

A micro-batch holds whole trajectories, so these need nothing from other micro-batches or ranks. Numbers of
trajectories may be any integers. The gradient is that of the sum or mean; where `mask` is False the result is 0.
"""

from __future__ import annotations

import torch

from learner.algorithms.kl import cut


def segment_sum(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] at each token the sum of `values` [N] over its trajectory (`trajectory` [N] int64, `mask` [N] bool)."""
    number, count = _numbered(trajectory)
    values = cut(values, mask)
    return cut(values.new_zeros(count).index_add(0, number, values)[number], mask)


def segment_count(trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] float64 at each token how many tokens its trajectory has that are not masked."""
    return segment_sum(mask.double(), trajectory, mask)


def segment_mean(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] at each token the mean of `values` [N] over its trajectory; masked tokens count in neither part."""
    return segment_sum(values, trajectory, mask) / segment_count(trajectory, mask).clamp(min=1).to(values.dtype)


def segment_max(values: torch.Tensor, trajectory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] at each token the largest of `values` [N] in its trajectory; a constant."""
    number, count = _numbered(trajectory)
    held = cut(values.detach(), mask, -torch.inf)
    largest = held.new_full((count,), -torch.inf).scatter_reduce(0, number, held, "amax")
    return cut(largest[number], mask)


def _numbered(trajectory: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Each token's trajectory counted from 0, and how many there are."""
    ids, number = torch.unique(trajectory, return_inverse=True)
    return number, len(ids)
