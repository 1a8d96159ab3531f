"""Between the flat layout of a micro-batch and rows of tokens (pure torch): where recursions over time are done."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Where each of N flat tokens stands among B rows of T tokens, one row a trajectory, T the longest.

    ids     [B] int64, the trajectory of each row, in the order in which they come
    row     [N] int64
    column  [N] int64
    mask    [B, T] bool, False where a row is padded at its end; there are no holes
    """

    ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    mask: torch.Tensor

    def pad(self, flat: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[B, T] of the dtype of `flat` [N], `fill` where a row is padded; gradients pass."""
        padded = torch.full(self.mask.shape, fill, dtype=flat.dtype, device=flat.device)
        return padded.index_put((self.row, self.column), flat)

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        """[N] from [B, T], or [N, ...] from [B, T, ...]; gradients pass."""
        return padded[self.row, self.column]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[N] from one value a row [B]: each token gets that of its trajectory."""
        return values[self.row]

    def last(self) -> torch.Tensor:
        """[B] int64: the flat position of the last token of each row."""
        return self.mask.sum(1).cumsum(0) - 1


def to_rows(trajectory: torch.Tensor) -> Rows:
    """Rows of flat tokens, given the number of each one's trajectory [N] int64.

    The tokens of a trajectory stand together and in order; the numbers are arbitrary. Observations are not among the N,
    so the holes of a multi-turn trajectory vanish: neighbours in a row are neighbours among the trained tokens.
    N = 0 gives B = T = 0. Raises ValueError when the tokens of a trajectory are not together.
    """
    ids, row, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    if len(torch.unique(ids)) != len(ids):
        raise ValueError("the tokens of a trajectory do not stand together")
    column = torch.arange(len(trajectory), device=trajectory.device) - (counts.cumsum(0) - counts)[row]
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=trajectory.device)[None, :] < counts[:, None]
    return Rows(ids, row, column, mask)
