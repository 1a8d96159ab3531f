"""Exact search by numpy over a memory-mapped matrix: the oracle, and enough for small corpora."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from retriever.encoder import Encoder, Vectors
from retriever.index.base import Hits
from retriever.index.dense import encode_in_chunks, exact_search

_FILE = "vectors.npy"


def build(encoder: Encoder, texts: Iterable[str], directory: Path) -> None:
    """Write the vectors as one float32 [ntotal, dim] array, chunk by chunk (memory: one chunk)."""
    raw = directory / "vectors.raw"
    count = 0
    with raw.open("wb") as file:
        for vectors in encode_in_chunks(encoder, texts):
            file.write(vectors.astype("<f4").tobytes())
            count += len(vectors)
    with (directory / _FILE).open("wb") as file, raw.open("rb") as source:
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, encoder.dim)}
        np.lib.format.write_array_header_1_0(file, header)
        while block := source.read(1 << 22):
            file.write(block)
    raw.unlink()


class MemoryVectors:
    """The vectors of one directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._vectors: Vectors = np.load(directory / _FILE, mmap_mode="r")

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return exact_search(self._vectors, queries, k)
