"""Keys and values of the running requests: one dense row each; rows 0..B-1 are in use.

With dense rows a decode step reads plain slices instead of gathering, which dominates its speed on a CPU. The cost is
padding: all rows are as wide as the longest one. Rows times width never exceeds the token budget, so memory is bounded
(by twice the budget while the rows are reallocated).
"""

from __future__ import annotations

import torch

WIDTH_STEP = 32
"""Rows grow by this many tokens, so that they are not reallocated at every step."""


def round_up(length: int) -> int:
    """Return the smallest valid width for `length` tokens."""
    return -(-length // WIDTH_STEP) * WIDTH_STEP


class KVCache:
    """`data` [layer, 2 (key, value), row, kv head, position, head_dim]. Unused positions contain finite numbers."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, budget: int) -> None:
        self.layers, self.kv_heads, self.head_dim, self.dtype, self.budget = layers, kv_heads, head_dim, dtype, budget
        self.rows, self.width = 0, 0
        self.data = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype)
        self._lay_out(1, WIDTH_STEP)

    @property
    def tokens(self) -> int:
        """Allocated memory of the rows, in tokens."""
        return self.rows * self.width

    def fits(self, rows: int, length: int) -> bool:
        """Return whether `rows` rows of `length` tokens fit into the budget."""
        return rows * round_up(length) <= self.budget

    def reserve(self, rows: int, length: int, most: int | None = None) -> None:
        """Allocate `rows` rows of `length` tokens and keep the contents. The caller must have checked `fits`.

        Allocates more, so that the next growth is not at once, unless that takes more than `most` tokens (the budget).
        """
        if rows <= self.rows and length <= self.width:
            return
        width = round_up(length)
        roomy_rows, roomy_width = max(rows, min(2 * self.rows, 2 * rows)), round_up(length + length // 4)
        for r, w in ((roomy_rows, roomy_width), (roomy_rows, width), (rows, roomy_width), (rows, width)):
            if r * w <= (self.budget if most is None else most) or (r, w) == (rows, width):
                self._lay_out(r, w)
                return

    def shrink(self, rows: int = 0, length: int = 0) -> None:
        """Free all memory but that of the first `length` tokens of the first `rows` rows."""
        self.rows, self.width = min(self.rows, rows), min(self.width, length)
        self._lay_out(max(rows, 1), round_up(max(length, 1)))

    def _lay_out(self, rows: int, width: int) -> None:
        # zeros, not empty: a masked position must not hold a NaN, since NaN + -inf is NaN
        data = torch.zeros(self.layers, 2, rows, self.kv_heads, width, self.head_dim, dtype=self.dtype)
        r, w = min(rows, self.rows), min(width, self.width)
        data[:, :, :r, :, :w] = self.data[:, :, :r, :, :w]
        self.data, self.rows, self.width = data, rows, width
        self.keys = [data[layer, 0] for layer in range(self.layers)]
        self.values = [data[layer, 1] for layer in range(self.layers)]
        self._flat = [
            (k.view(-1, self.head_dim), v.view(-1, self.head_dim)) for k, v in zip(self.keys, self.values, strict=True)
        ]
        self._heads = torch.arange(self.kv_heads)

    def address(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the addresses of tokens (int64 [T] rows and positions) for `write`: int64 [T * K]."""
        return ((rows[:, None] * self.kv_heads + self._heads) * self.width + positions[:, None]).view(-1)

    def write(self, layer: int, address: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, K, D] of one layer."""
        flat_keys, flat_values = self._flat[layer]
        flat_keys.index_copy_(0, address, keys.reshape(-1, self.head_dim))
        flat_values.index_copy_(0, address, values.reshape(-1, self.head_dim))

    def save(self, row: int, length: int) -> torch.Tensor:
        """Return a copy of the first `length` positions of `row`: [layer, 2, kv head, length, head_dim]."""
        return self.data[:, :, row, :, :length].clone()

    def restore(self, row: int, segment: torch.Tensor, length: int) -> None:
        """Fill the first `length` positions of `row` from a segment that `save` made."""
        self.data[:, :, row, :, :length] = segment[:, :, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def scrub(self, row: int) -> None:
        """Zero a row that may contain NaN."""
        self.data[:, :, row] = 0
