"""Exact search with numpy over a memory-mapped matrix: the reference, sufficient for small corpora."""

from __future__ import annotations

from pathlib import Path

from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, PassageSource
from retriever.index.config import MemoryIndexSettings
from retriever.index.dense import DenseIndex, StoredVectors, exact_search, longest


class ExactIndex(DenseIndex):
    """An encoder with an exact numpy search."""

    def __init__(self, settings: MemoryIndexSettings, directory: Path, *, threads: int) -> None:
        """Open the index. `threads` is ignored: numpy's BLAS uses OMP_NUM_THREADS."""
        super().__init__(build_encoder(settings.encoder), ExactVectors(directory))

    @staticmethod
    def build(settings: MemoryIndexSettings, source: PassageSource, directory: Path) -> None:
        """Encode the texts of `source` and write the vectors into `directory`."""
        source.vectors(settings.encoder, settings.dtype, directory)


class ExactVectors:
    """The vectors of one directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._vectors: StoredVectors = store.open_vectors(directory)

    @property
    def ntotal(self) -> int:
        """Return the number of vectors."""
        return len(self._vectors)

    def longest(self) -> float:
        """See `dense.UnitLengthIndex`."""
        return longest(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return exact_search(self._vectors, queries, k)
