"""Exact search by numpy over a memory-mapped matrix: the oracle, and enough for small corpora."""

from __future__ import annotations

from pathlib import Path

from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits
from retriever.index.dense import Stored, exact_search, longest


class MemoryVectors:
    """The vectors of one directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._vectors: Stored = store.open_vectors(directory)

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    def longest(self) -> float:
        """See `lengths.Measured`."""
        return longest(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return exact_search(self._vectors, queries, k)
