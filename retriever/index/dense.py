"""Exact inner-product search, and the encoder before a vector index.

float32 matrix products differ in the last bits with the shape of the batch, so ranking by them would make a hit's
place depend on its neighbours in the batch. Therefore they only select candidates, generously, and the candidates are
scored again in float64, each pair by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from retriever.encoder.base import Encoder, Vectors
from retriever.index.base import Hits, Rows, Scores, VectorIndex, top_rows

_MAX_SCORES = 1 << 24
"""Most float32 scores held at once (64 MiB)."""


class DenseIndex:
    """An encoder and a vector index as one `Index`."""

    def __init__(self, encoder: Encoder, vectors: VectorIndex) -> None:
        self.encoder, self._vectors = encoder, vectors

    @property
    def ntotal(self) -> int:
        """Number of passages."""
        return self._vectors.ntotal

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `base.Index`."""
        return self._vectors.search(self.encoder.encode_queries(queries), k)


def tolerance(dim: int) -> float:
    """Bound on the difference of two float32 inner products of vectors of length <= 1, whatever their summation order.

    One dot product summed in 8 or more lanes is off by at most (dim / 8 + 8) * 2**-24 (Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1); two of them together stay below dim * 2**-24 for dim >= 22.
    """
    return max(dim, 32) * 2.0**-24


def rescore(vectors: Vectors, query: npt.NDArray[np.float32], rows: Rows) -> Scores:
    """Inner products of `query` [dim] with `vectors[rows]`, summed in float64: the same bits for a pair, always."""
    products = np.multiply(vectors[rows], query, dtype=np.float64)
    total: npt.NDArray[np.float64] = products.sum(axis=1)
    return total.astype(np.float32)


def best_of(vectors: Vectors, query: npt.NDArray[np.float32], candidates: Rows, k: int) -> tuple[Rows, Scores]:
    """The k best of the candidate rows (any order), scored again."""
    candidates = np.sort(candidates)
    scores = rescore(vectors, query, candidates)
    order = top_rows(scores, k)
    return candidates[order], scores[order]


def exact_search(vectors: Vectors, queries: Vectors, k: int) -> Hits:
    """Exact search by numpy over vectors [ntotal, dim] for queries [n, dim]."""
    ntotal, dim = vectors.shape
    k = min(k, ntotal)
    margin = np.float32(tolerance(dim))
    rows = np.empty((len(queries), k), dtype=np.int64)
    scores = np.empty((len(queries), k), dtype=np.float32)
    step = max(1, _MAX_SCORES // ntotal)
    for start in range(0, len(queries), step):
        rough = queries[start : start + step] @ vectors.T
        for i, line in enumerate(rough, start):
            threshold = np.partition(line, ntotal - k)[ntotal - k] - margin
            rows[i], scores[i] = best_of(vectors, queries[i], np.flatnonzero(line >= threshold), k)
    return Hits(rows, scores)


def search_candidates(
    rough_search: Callable[[Vectors, int], tuple[Scores, Rows]], vectors: Vectors, queries: Vectors, k: int, spare: int
) -> Hits:
    """Exact search from a rough one that returns (scores, rows) [n, c], best first, for c candidates.

    Where the last candidate is too near the k-th to rule out that others tie with it, the query is searched
    again in full: rare in real text, but blank or duplicated passages do it.
    """
    ntotal, dim = vectors.shape
    k = min(k, ntotal)
    count = min(ntotal, k + spare)
    rough_scores, candidates = rough_search(queries, count)
    hits = Hits(np.empty((len(queries), k), dtype=np.int64), np.empty((len(queries), k), dtype=np.float32))
    unsure = (rough_scores[:, -1] >= rough_scores[:, k - 1] - tolerance(dim)) if count < ntotal else np.zeros(0, bool)
    for i in range(len(queries)):
        if count < ntotal and unsure[i]:
            found = exact_search(vectors, queries[i : i + 1], k)
            hits.rows[i], hits.scores[i] = found.rows[0], found.scores[0]
        else:
            hits.rows[i], hits.scores[i] = best_of(vectors, queries[i], candidates[i].astype(np.int64), k)
    return hits
