"""Exact inner product by FAISS on CPUs, straight from the memory map: nothing is copied, replicas share the pages."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, Rows, Scores
from retriever.index.dense import search_candidates

# faiss reports every instruction set that its wheel does not hold
logging.getLogger("faiss.loader").setLevel(logging.WARNING)
import faiss  # noqa: E402

SPARE = 32
"""Candidates beyond k that FAISS is asked for."""

# FAISS scans vector by vector for batches below this many queries, and its default (128000 distances, in effect batches
# of up to about 128) is 16 times slower at 64 queries than its BLAS path (measured, 100k x 768).
_BLAS_FROM = 4


class FaissFlatVectors:
    """The vectors of one directory. The thread count belongs to the thread that opens it."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
        faiss.omp_set_num_threads(threads or os.cpu_count() or 1)
        self._vectors: Vectors = store.open_vectors(directory)

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return search_candidates(self._rough, self._vectors, queries, k, SPARE)

    def _rough(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        scores, rows = faiss.knn(np.ascontiguousarray(queries), self._vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
        return scores, rows
