"""Exact inner product by FAISS on CPUs, straight from the memory map: nothing is copied, replicas share the pages.

The map is that of our own `vectors.npy`, or of a FAISS file that somebody else built.
"""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.config_index_base import FileBase
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, Rows, Scores, Source
from retriever.index.dense import Stored, search_candidates
from retriever.index.faiss_file import check_fits, check_survives, open_file, stored_vectors, use_threads
from retriever.index.lengths import longest

SPARE = 8
"""Candidates beyond k that FAISS is asked for."""

# FAISS scans vector by vector for batches below this many queries, and its default (128000 distances, in effect batches
# of up to about 128) is 16 times slower at 64 queries than its BLAS path (measured, 100k x 768).
_BLAS_FROM = 4

_WIDENED_BYTES = 8 << 20
"""Float32 vectors made of float16 ones at a time: few enough for the cache, many enough for a matrix product."""


def build(settings: FileBase, source: Source, directory: Path) -> None:
    """Vectors from the corpus, or a look at the file that has them."""
    if settings.file is None:
        source.vectors(settings.encoder, settings.dtype, directory)
        return
    check_survives(settings.file)
    check_fits(settings.file, open_flat_file(settings.file).shape, settings, source)


def open_flat_file(path: Path) -> Stored:
    """The vectors in a file, memory-mapped."""
    index = open_file(path, (faiss.IndexFlat, faiss.IndexScalarQuantizer), "a flat index")
    vectors = stored_vectors(index)
    if vectors is None:
        raise UserError(
            f"{path} holds vectors that are quantised further than float16",
            todo="build it as a Flat or SQfp16 index",
        )
    return vectors


def open_flat(settings: FileBase, directory: Path, *, threads: int) -> FaissFlatVectors:
    """Over the file of the settings, or what `build` wrote."""
    vectors = store.open_vectors(directory) if settings.file is None else open_flat_file(settings.file)
    return FaissFlatVectors(vectors, threads=threads)


class FaissFlatVectors:
    """Over vectors [ntotal, dim], C order. The thread count belongs to the thread that opens it."""

    def __init__(self, vectors: Stored, *, threads: int) -> None:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
        use_threads(threads)
        self._vectors = vectors

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    def longest(self) -> float:
        """See `lengths.Measured`."""
        return longest(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return search_candidates(self._rough, self._vectors, np.ascontiguousarray(queries), k, SPARE)

    def _rough(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Best first. float16 vectors are widened block by block."""
        if self._vectors.dtype == np.float32:
            scores, rows = faiss.knn(queries, self._vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
            return scores, rows
        heap = faiss.ResultHeap(len(queries), count, keep_max=True)
        for first, block in store.blocks(self._vectors, block_bytes=_WIDENED_BYTES):
            scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            heap.add_result(scores, rows + first)
        heap.finalize()
        return heap.D, heap.I
