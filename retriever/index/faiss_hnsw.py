"""A navigable graph with FAISS. One memory-mapped file has links and vectors; hits are rescored from it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import faiss

from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import faiss_flat, store
from retriever.index.base import PassageSource, Rows, Scores, VectorIndex
from retriever.index.config import FaissHnswSettings
from retriever.index.dense import ApproximateVectors, DenseIndex, StoredVectors

log = logging.getLogger(__name__)
FILE = "index.faiss"
_Parameters: Any = getattr(faiss, "SearchParametersHNSW")  # noqa: B009 -- FAISS's type stubs do not know it
SPARE = 8
"""Extra candidates beyond k for rescoring: float32 sums may swap neighbours."""
_ADD_BYTES = 256 << 20


class FaissHnswIndex(DenseIndex):
    """An encoder with a graph index."""

    def __init__(self, settings: FaissHnswSettings, directory: Path, *, threads: int) -> None:
        super().__init__(build_encoder(settings.encoder), open_hnsw(settings, directory, threads=threads))

    @staticmethod
    def build(settings: FaissHnswSettings, source: PassageSource, directory: Path) -> None:
        """Encode and build the graph, or check the configured file. Below `exact_below` only vectors are written.

        Memory: all vectors and links.
        """
        if settings.file is not None:
            faiss_flat.check_readable(settings.file)
            index = faiss_flat.open_file(settings.file, faiss.IndexHNSW, "a graph (HNSW)")
            faiss_flat.check_fits(settings.file, (index.ntotal, index.d), settings, source)
            return
        source.vectors(settings.encoder, settings.dtype, directory)
        vectors = store.open_vectors(directory)
        if len(vectors) < settings.exact_below:
            return
        path = directory / FILE
        faiss.write_index(graph(settings, vectors), str(path))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        # the graph's file also has the vectors: once it is durable, the others only take disk space
        (directory / store.FILE).unlink()


def open_hnsw(settings: FaissHnswSettings, directory: Path, *, threads: int) -> VectorIndex:
    """Open the configured file, or the output of `build`."""
    path = settings.file or directory / FILE
    if settings.file is None and not path.exists():
        return faiss_flat.FaissFlatVectors(store.open_vectors(directory), threads=threads)
    faiss_flat.use_threads(threads)
    index = faiss_flat.open_file(path, faiss.IndexHNSW, "a graph (HNSW)")

    def rough(queries: Vectors, count: int) -> tuple[Scores, Rows]:
        parameters = _Parameters(efSearch=max(settings.ef_search, count))
        scores, rows = index.search(queries, count, params=parameters)
        return scores, rows

    return ApproximateVectors(rough, index.ntotal, faiss_flat.stored_vectors(index), lambda k: k + SPARE)


def graph(settings: FaissHnswSettings, vectors: StoredVectors) -> Any:
    """Return a graph of the vectors."""
    faiss_flat.use_threads(settings.build_threads)
    dim = vectors.shape[1]
    index: Any
    if vectors.dtype == "float16":
        half: Any = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexHNSWSQ(dim, half, settings.m, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexHNSWFlat(dim, settings.m, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = settings.ef_construction
    for first, block in store.blocks(vectors, block_bytes=_ADD_BYTES):
        index.add(block)
        log.info("%d of %d passages are in the graph", first + len(block), len(vectors))
    return index
