"""What an index promises, and the order of its hits.

Hits are ordered by (score descending, row ascending), exactly: equal passages come in the order of the corpus, and a
query's hits do not depend on which other queries share its batch. So a cached answer equals a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class Hits(NamedTuple):
    """rows int64 [n, k'], scores float32 [n, k'] with k' = min(k, ntotal); every row is in [0, ntotal)."""

    rows: Rows
    scores: Scores


class Index(Protocol):
    """A searchable index over passages 0 .. ntotal-1. Opened and searched by one thread only."""

    @property
    def ntotal(self) -> int:
        """Number of passages."""

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """The best min(k, ntotal) rows of every query, k >= 1, best first, in the order of the module's docstring."""


class VectorIndex(Protocol):
    """The same over vectors; `dense.DenseIndex` puts an encoder before it."""

    @property
    def ntotal(self) -> int:
        """Number of vectors."""

    def search(self, queries: npt.NDArray[np.float32], k: int) -> Hits:
        """queries float32 [n, dim] of length at most 1."""


def top_rows(scores: Scores, k: int) -> Rows:
    """Positions of the k best of `scores` [n], k <= n, by (score descending, position ascending)."""
    n = len(scores)
    if k < n:
        # argpartition alone would pick any of those that tie with the k-th
        threshold = np.partition(scores, n - k)[n - k]
        better = np.flatnonzero(scores > threshold)
        equal = np.flatnonzero(scores == threshold)[: k - len(better)]
        chosen = np.concatenate([better, equal])
    else:
        chosen = np.arange(n)
    return chosen[np.lexsort((chosen, -scores[chosen]))]
