"""A rough search that may miss, with its candidates scored again: what graphs, inverted lists and GPUs share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from retriever.encoder.base import Vectors
from retriever.index.base import Hits, Rows, Scores
from retriever.index.dense import Stored, in_order, rank


class ApproximateVectors:
    """See `base.VectorIndex`. Fewer than k passages found: the rest is NO_ROW."""

    def __init__(
        self,
        rough_search: Callable[[Vectors, int], tuple[Scores, Rows]],
        ntotal: int,
        vectors: Stored | None,
        candidates: Callable[[int], int],
    ) -> None:
        """`rough_search` gives (scores, rows) [n, c], rows distinct or NO_ROW; `candidates` maps k to c >= k.

        Without `vectors` the rough scores are the scores.
        """
        self._rough, self._ntotal, self._vectors = rough_search, ntotal, vectors
        self._candidates = candidates

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return self._ntotal

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        k = min(k, self._ntotal)
        if not len(queries):
            return Hits(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        scores, rows = self._rough(np.ascontiguousarray(queries), min(self._ntotal, self._candidates(k)))
        if self._vectors is None:
            return in_order(rows, scores, k)
        return rank(self._vectors, queries, rows, k)
