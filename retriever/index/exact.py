"""Exact search with numpy over a memory-mapped matrix: the reference, sufficient for small corpora."""

from __future__ import annotations

from pathlib import Path

from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, PassageSource
from retriever.index.config import MemoryIndexSettings
from retriever.index.dense import DenseIndex, OverStoredVectors, exact_search


class ExactIndex(DenseIndex):
    """An encoder with an exact numpy search."""

    def __init__(self, settings: MemoryIndexSettings, directory: Path, *, threads: int) -> None:
        """Open the index. `threads` is ignored: numpy's BLAS uses OMP_NUM_THREADS."""
        super().__init__(build_encoder(settings.encoder), ExactVectors(directory))

    @staticmethod
    def build(settings: MemoryIndexSettings, source: PassageSource, directory: Path) -> None:
        """Encode the texts of `source` and write the vectors into `directory`."""
        source.vectors(settings.encoder, settings.dtype, directory)


class ExactVectors(OverStoredVectors):
    """The vectors of one directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        super().__init__(store.open_vectors(directory))

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return exact_search(self._vectors, queries, k)
