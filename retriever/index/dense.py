"""Exact inner-product search, the order of dense hits, and the encoder of a vector index.

float32 matrix products differ in the last bits with the shape of the batch, so a ranking by them would depend on the
other queries in the batch. Therefore they only select candidates, generously, which are then rescored in float64, each
pair separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from retriever.encoder.base import Encoder, Vectors
from retriever.index import store
from retriever.index.base import NO_ROW, Hits, Rows, Scores, VectorIndex, top_rows

StoredVectors = npt.NDArray[Any]
"""Stored vectors [ntotal, dim]: float32 or float16, aligned or not."""
_QUERIES = 128
"""Maximum queries scored against one block of vectors at a time."""
_DOUBLES = 1 << 20
"""Maximum float64 products in memory during rescoring (8 MiB)."""
_WIDEN = 16
_WIDEST = 2048


class DenseIndex:
    """An encoder and a vector index as one `Index`."""

    def __init__(self, encoder: Encoder, vectors: VectorIndex) -> None:
        self.encoder = encoder
        self._vectors = (
            QueryRescaler(vectors) if isinstance(vectors, UnitLengthIndex) and not encoder.normalized else vectors
        )

    @property
    def ntotal(self) -> int:
        """Return the number of passages."""
        return self._vectors.ntotal

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `base.Index`."""
        return self._vectors.search(self.encoder.encode_queries(queries), k)


def exact_search(vectors: StoredVectors, queries: Vectors, k: int) -> Hits:
    """Search exactly with numpy over vectors [ntotal, dim] for queries [n, dim], block by block in bounded memory."""
    k = min(k, len(vectors))
    hits = Hits(np.empty((len(queries), k), dtype=np.int64), np.empty((len(queries), k), dtype=np.float32))
    for start in range(0, len(queries), _QUERIES):
        part = slice(start, start + _QUERIES)
        hits.rows[part], hits.scores[part] = _exact(vectors, queries[part], k)
    return hits


def _exact(vectors: StoredVectors, queries: Vectors, k: int) -> Hits:
    margin = np.float32(tolerance(vectors.shape[1]))
    best = Hits(np.full((len(queries), k), NO_ROW), np.full((len(queries), k), -np.inf, dtype=np.float32))
    # a blank query ties with everything, so every passage would be rescored
    blank = ~queries.any(axis=1)
    best.rows[blank], best.scores[blank] = np.arange(k), 0.0
    asked = np.flatnonzero(~blank)
    for first, block in store.blocks(vectors):
        rough = queries[asked] @ block.T
        floors = best.scores[asked, k - 1]
        if k < len(block):
            floors = np.maximum(floors, np.partition(rough, len(block) - k, axis=1)[:, len(block) - k])
        floors -= margin
        for i in np.flatnonzero(rough.max(axis=1) >= floors).tolist() if len(asked) else ():
            query = asked[i]
            found = np.flatnonzero(rough[i] >= floors[i]) + first
            # equal scores in corpus order: earlier blocks first
            rows = np.concatenate([best.rows[query], found])
            scores = np.concatenate([best.scores[query], rescore(vectors, queries[query][None], found[None])[0]])
            chosen = top_rows(scores, k)
            best.rows[query], best.scores[query] = rows[chosen], scores[chosen]
    return best


def search_candidates(
    rough_search: Callable[[Vectors, int], tuple[Scores, Rows]],
    vectors: StoredVectors,
    queries: Vectors,
    k: int,
    spare: int,
    *,
    margin: float | None = None,
) -> Hits:
    """Search exactly, using an approximate search that returns (scores, rows) [n, c], best first, for c candidates.

    `margin` bounds the error of the difference of two approximate scores; default: that of float32 products.

    If the last candidate is too close to the k-th to rule out further ties, the query is repeated with more candidates,
    and finally in full: rare in real text, but blank or duplicated passages cause it.
    """
    ntotal, dim = vectors.shape
    margin = tolerance(dim) if margin is None else margin
    k = min(k, ntotal)
    count = min(ntotal, k + spare)
    rough_scores, candidates = rough_search(queries, count)
    hits = rank(vectors, queries, candidates, k)
    if count == ntotal:
        return hits
    blank = ~queries.any(axis=1)
    hits.rows[blank], hits.scores[blank] = np.arange(k), 0.0  # they tie with everything
    unsure = np.flatnonzero((rough_scores[:, -1] >= rough_scores[:, k - 1] - margin) & ~blank)
    if len(unsure):
        again = queries[unsure]
        wider = max(1, spare) * _WIDEN
        found = (
            search_candidates(rough_search, vectors, again, k, wider, margin=margin)
            if wider <= _WIDEST
            else exact_search(vectors, again, k)
        )
        hits.rows[unsure], hits.scores[unsure] = found
    return hits


class ApproximateVectors:
    """An approximate search with rescored candidates, shared by graphs, inverted lists and GPUs.

    See `base.VectorIndex`. If fewer than k passages are found, the rest is NO_ROW.
    """

    def __init__(
        self,
        rough_search: Callable[[Vectors, int], tuple[Scores, Rows]],
        ntotal: int,
        vectors: StoredVectors | None,
        candidates: Callable[[int], int],
    ) -> None:
        """`rough_search` returns (scores, rows) [n, c], rows distinct or NO_ROW; `candidates` maps k to c >= k.

        Without `vectors` the approximate scores are used.
        """
        self._rough, self._ntotal, self._vectors = rough_search, ntotal, vectors
        self._candidates = candidates

    @property
    def ntotal(self) -> int:
        """Return the number of vectors."""
        return self._ntotal

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        k = min(k, self._ntotal)
        if not len(queries):
            return Hits(np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=np.float32))
        scores, rows = self._rough(np.ascontiguousarray(queries), min(self._ntotal, self._candidates(k)))
        if self._vectors is None:
            return sort_hits(rows, scores, k)
        return rank(self._vectors, queries, rows, k)


@runtime_checkable
class UnitLengthIndex(VectorIndex, Protocol):
    """An index that is exact for vectors of length at most 1."""

    def longest(self) -> float:
        """Return the length of its longest vector. Reads all of them."""


class QueryRescaler:
    """Adapts vectors of any length to an index that is exact for lengths of at most 1 (DPR's and Contriever's are
    longer).

    The bound on rounding errors (`tolerance`) grows with the lengths of both vectors. Each query is therefore divided
    by a power of two so that its product with the longest passage is at most 1, and its scores are multiplied by it.
    Both operations are exact in binary, so rows, order and scores are those of the original vectors.
    """

    def __init__(self, inner: UnitLengthIndex) -> None:
        """Read all vectors of `inner` once."""
        self._inner, self._longest = inner, inner.longest()

    @property
    def ntotal(self) -> int:
        """Return the number of vectors."""
        return self._inner.ntotal

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`; queries of any length."""
        products = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True) * self._longest
        # 1 for blank queries and for those short enough already
        scales = np.exp2(np.ceil(np.log2(np.maximum(products, 1.0)))).astype(np.float32)
        hits = self._inner.search(queries / scales, k)
        return Hits(hits.rows, hits.scores * scales)


class OverStoredVectors:
    """The part of a vector index that searches stored vectors [ntotal, dim] itself."""

    def __init__(self, vectors: StoredVectors) -> None:
        self._vectors = vectors

    @property
    def ntotal(self) -> int:
        """Return the number of vectors."""
        return len(self._vectors)

    def longest(self) -> float:
        """See `UnitLengthIndex`."""
        return longest(self._vectors)


def longest(vectors: npt.NDArray[Any]) -> float:
    """Return the length of the longest row of vectors [ntotal, dim], read block by block."""
    return max(
        (float(np.sqrt(np.einsum("nd,nd->n", block, block).max())) for _, block in store.blocks(vectors)), default=0
    )


def tolerance(dim: int) -> float:
    """Return a bound on the difference of two float32 inner products of vectors of length <= 1, summed in any order.

    One dot product summed in 8 or more lanes is off by at most (dim / 8 + 8) * 2**-24 (Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1); two of them together stay below dim * 2**-24 for dim >= 22.
    """
    return max(dim, 32) * 2.0**-24


def rank(vectors: StoredVectors, queries: Vectors, rows: Rows, k: int) -> Hits:
    """Return the k best of the candidate rows [n, c >= k], which may contain NO_ROW, rescored."""
    rows = rows.astype(np.int64, copy=False)
    return sort_hits(rows, rescore(vectors, queries, np.maximum(rows, 0)), k)


def rescore(vectors: StoredVectors, queries: Vectors, rows: Rows) -> Scores:
    """Return the inner products [n, c] of queries [n, dim] with `vectors[rows]`, rows [n, c], summed in float64.

    A pair always gives the same bits, because it is summed separately. Uses bounded memory.
    """
    n, c = rows.shape
    dim = vectors.shape[1]
    scores = np.empty((n, c), dtype=np.float32)
    width = max(1, min(c, _DOUBLES // dim))
    height = max(1, _DOUBLES // (dim * width))
    for i in range(0, n, height):
        for j in range(0, c, width):
            products = vectors[rows[i : i + height, j : j + width]].astype(np.float64)
            products *= queries[i : i + height, None, :]
            scores[i : i + height, j : j + width] = products.sum(axis=2)
    scores += 0.0  # -0.0 becomes 0.0
    return scores


def sort_hits(rows: Rows, scores: Scores, k: int) -> Hits:
    """Return the first k of candidates [n, c], c >= k, by (score descending, row ascending), NO_ROW last."""
    scores = np.where(rows == NO_ROW, np.float32(-np.inf), scores)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return Hits(np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1))
