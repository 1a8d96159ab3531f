"""Searching inverted lists: on CPUs through a memory map, or on GPUs that share the lists.

Which lists are scanned for a query is found exactly here and not by FAISS, whose float32 products differ in the last
bits with the batch: else a query's hits could depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retriever.config_index_faiss import FaissIvfPqSettings
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.approximate import ApproximateVectors
from retriever.index.base import Hits, Rows, Scores, VectorIndex
from retriever.index.faiss_file import open_file, use_threads
from retriever.index.faiss_flat import FaissFlatVectors
from retriever.index.faiss_ivf_build import FILE, KINDS, IvfSettings
from retriever.index.lengths import AnyLength

SPARE = 8
"""Candidates beyond k that are scored again where lists hold whole vectors: float32 sums may swap neighbours."""


def open_ivf(settings: IvfSettings, directory: Path, *, threads: int) -> VectorIndex:
    """Over the file of the settings, whose own scores are the scores, or what `build` wrote."""
    path = settings.file or directory / FILE
    if settings.file is None and not path.exists():
        return FaissFlatVectors(store.open_vectors(directory), threads=threads)
    use_threads(threads)
    index = open_file(path, KINDS, "an inverted file (IVF)")
    vectors = store.open_vectors(directory) if settings.file is None else None
    rough: Callable[[Vectors, int], tuple[Scores, Rows]]
    if settings.devices:
        from retriever.index.faiss_gpu import GpuLists

        rough = GpuLists(index, settings).search
    else:
        rough = Lists(index, settings.nprobe, threads=threads).search
    return ApproximateVectors(rough, index.ntotal, vectors, _candidates(settings))


def _candidates(settings: IvfSettings) -> Callable[[int], int]:
    refine = settings.refine if isinstance(settings, FaissIvfPqSettings) else 1
    return lambda k: max(k + SPARE, k * refine)


class Lists:
    """An IndexIVF, or one behind a rotation."""

    def __init__(self, index: Any, nprobe: int, *, threads: int) -> None:
        self._whole = index  # owns what follows
        self._before: list[Any] = []
        self._ivf: Any = faiss.extract_index_ivf(index)
        if isinstance(index, faiss.IndexPreTransform):
            chain: Any = index.chain
            self._before = [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]
        self._ivf.nprobe = self._nprobe = min(nprobe, self._ivf.nlist)
        quantizer = faiss.downcast_index(self._ivf.quantizer)
        self._quantizer = quantizer
        self._centroids: VectorIndex | None = None
        if isinstance(quantizer, faiss.IndexFlat):
            matrix = quantizer.reconstruct_n(0, self._ivf.nlist)
            self._centroids = AnyLength(FaissFlatVectors(matrix, threads=threads))

    def search(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """The best `count` passages in the nearest lists."""
        turned = self._turned(queries)
        nearest = self._nearest(turned)
        scores, rows = self._ivf.search_preassigned(turned, count, nearest.rows, nearest.scores)
        return scores, rows

    def _turned(self, queries: Vectors) -> Vectors:
        if not self._before:
            return queries
        # one at a time: FAISS's product over a batch differs in the last bits with its size
        turned = []
        for i in range(len(queries)):
            query = queries[i : i + 1]
            for transform in self._before:
                query = transform.apply(query)
            turned.append(query)
        return np.concatenate(turned)

    def _nearest(self, queries: Vectors) -> Hits:
        if self._centroids is not None:
            return self._centroids.search(queries, self._nprobe)
        scores, rows = self._quantizer.search(queries, self._nprobe)
        return Hits(rows, scores)
