"""Exact inner product by FAISS (`IndexFlatIP`) on CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from retriever.encoder import Encoder, Vectors
from retriever.index.base import Hits, Rows, Scores
from retriever.index.dense import encode_in_chunks, search_candidates

# faiss reports every instruction set that its wheel does not hold
logging.getLogger("faiss.loader").setLevel(logging.WARNING)
import faiss  # noqa: E402

_FILE = "index.faiss"

SPARE = 32
"""Candidates beyond k that FAISS is asked for."""

# FAISS scans vector by vector for batches below this many queries, and its default (128000 distances, in effect batches
# of up to about 128) is 16 times slower at 64 queries than its BLAS path (measured, 100k x 768).
_BLAS_FROM = 4


def build(encoder: Encoder, texts: Iterable[str], directory: Path) -> None:
    """Encode chunk by chunk into an `IndexFlatIP` (memory: 4 * dim bytes a passage) and write it."""
    index = faiss.IndexFlatIP(encoder.dim)
    for vectors in encode_in_chunks(encoder, texts):
        index.add(vectors)
    faiss.write_index(index, str(directory / _FILE))


class FaissFlatVectors:
    """The FAISS index of one directory, in memory. The thread count belongs to the thread that opens it."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
        faiss.omp_set_num_threads(threads or os.cpu_count() or 1)
        self._index = cast(Any, faiss.read_index(str(directory / _FILE)))
        shape = (self._index.ntotal, self._index.d)
        # a view of FAISS's own memory: the candidates are scored again from it
        self._vectors: Vectors = faiss.rev_swig_ptr(self._index.get_xb(), shape[0] * shape[1]).reshape(shape)

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return search_candidates(self._rough, self._vectors, queries, k, SPARE)

    def _rough(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        scores, rows = self._index.search(np.ascontiguousarray(queries), count)
        return scores, rows
