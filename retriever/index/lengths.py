"""Vectors of any length before an index that is exact for lengths of at most 1 (DPR's and Contriever's are longer).

The bound on rounding errors (`dense.tolerance`) grows with the lengths of both vectors. So every query is divided by a
power of two, such that its product with the longest passage stays within 1, and its scores are multiplied by it again:
both are exact in binary, so rows, order and scores are those of the vectors as they are.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, VectorIndex


@runtime_checkable
class Measured(VectorIndex, Protocol):
    """An index whose exactness needs lengths of at most 1."""

    def longest(self) -> float:
        """Length of its longest vector. Reads all of them."""


def longest(vectors: npt.NDArray[Any]) -> float:
    """Length of the longest row of vectors [ntotal, dim], read block by block."""
    return max(
        (float(np.sqrt(np.einsum("nd,nd->n", block, block).max())) for _, block in store.blocks(vectors)), default=0
    )


class AnyLength:
    """See the module's docstring. Reads all vectors of `inner` once, when it is made."""

    def __init__(self, inner: Measured) -> None:
        self._inner, self._longest = inner, inner.longest()

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return self._inner.ntotal

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`; queries of any length."""
        products = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True) * self._longest
        # 1 for a blank query, and for what is short enough as it is
        scales = np.exp2(np.ceil(np.log2(np.maximum(products, 1.0)))).astype(np.float32)
        hits = self._inner.search(queries / scales, k)
        return Hits(hits.rows, hits.scores * scales)
