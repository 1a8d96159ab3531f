"""Functions of [B, T] rows, applied to the flat tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.advantages import to_rows
from learner.algorithms.base import Scored

OnRows = Callable[..., tuple[torch.Tensor, ...]]
"""(mask [B, T], one [B, T] for each flat tensor) -> [B, T] each."""


def over_rows(scored: Scored, function: OnRows, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `function` makes of the flat tensors [N], flat again: a row is a trajectory, so nothing crosses from one to
    another, whatever the packing. Masked tokens (dummies) give 0.
    """
    rows = to_rows(scored.trajectory)
    mask = rows.pad(scored.mask) & rows.mask
    return tuple(rows.flat(x) for x in function(mask, *(rows.pad(x) for x in flat)))
