"""The vectors of an index on disk: one raw matrix, memory-mapped, so that replicas on a host share it without copies.

`vectors.npy` is numpy's format, [ntotal, dim] in float32 or float16, C order. It is written once, front to back;
readers see none or all of it, because an index directory appears by one rename. Rows have the length that the encoder
gives them: 1 for most, any for DPR and Contriever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.runtime.files import reading
from retriever.encoder.base import Vectors

FILE = "vectors.npy"
BLOCK_BYTES = 32 << 20
"""Default size of a block of float32 vectors."""
DIGEST_BLOCK = 4096
DIGEST_BLOCKS = 64


def create(directory: Path, ntotal: int, dim: int, dtype: str) -> npt.NDArray[Any]:
    """Create a file of zeros, or open the one with this shape and dtype, and return a writable map of it."""
    path = directory / FILE
    if path.exists():
        found: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r+")
        if found.shape == (ntotal, dim) and found.dtype == np.dtype(dtype):
            return found
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(ntotal, dim))


def open_vectors(directory: Path) -> npt.NDArray[Any]:
    """Return the matrix, read-only, as a plain view of the map (numpy's memmap class makes every slice slower)."""
    return np.asarray(np.load(directory / FILE, mmap_mode="r"))


def blocks(
    vectors: npt.NDArray[Any], start: int = 0, stop: int | None = None, block_bytes: int | None = None
) -> Iterator[tuple[int, Vectors]]:
    """Yield (first row, aligned float32 [n, dim]) of rows start .. stop-1, in blocks of `block_bytes` or BLOCK_BYTES.

    A block is valid until the next one: float16 and unaligned vectors are copied into one buffer.
    """
    stop = len(vectors) if stop is None else stop
    dim = vectors.shape[1]
    step = max(1, (block_bytes or BLOCK_BYTES) // (4 * dim))
    as_is = vectors.dtype == np.float32 and vectors.flags.aligned
    buffer = np.empty((0 if as_is else min(step, max(stop - start, 0)), dim), dtype=np.float32)
    for first in range(start, stop, step):
        block = vectors[first : min(first + step, stop)]
        if not as_is:
            # a new array per block would take twice as long, because its pages are faulted in one by one
            buffer[: len(block)] = block
            block = buffer[: len(block)]
        yield first, block


def file_digest(path: Path) -> dict[str, Any]:
    """Return the identity of a file of tens of GB: `bytes` (size) and `sha256_of_blocks` (16 hexadecimal digits).

    Reads the head, the tail and evenly spaced blocks, 256 KiB in total. Raises UserError if it cannot be read.
    """
    todo = "set index.file to a FAISS file, or remove it to build from the corpus"
    with reading(f"the index file {path}", todo), path.open("rb") as file:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(DIGEST_BLOCKS):
            file.seek(max(0, size - DIGEST_BLOCK) * i // (DIGEST_BLOCKS - 1))
            digest.update(file.read(DIGEST_BLOCK))
    return {"bytes": size, "sha256_of_blocks": digest.hexdigest()[:16]}
