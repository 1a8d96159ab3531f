"""The vectors of an index on disk: one raw matrix, memory-mapped, so that replicas on a host share it and none copies.

`vectors.npy` is numpy's format, [ntotal, dim] in float32 or float16, rows of length at most 1, C order. It is written
once, front to back; a reader sees either none or all of it, since an index directory appears by one rename.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FILE = "vectors.npy"


def create(directory: Path, ntotal: int, dim: int, dtype: str) -> npt.NDArray[Any]:
    """A writable map of a new file of zeros (or of the one that is there, where shape and dtype are the same)."""
    path = directory / FILE
    if path.exists():
        found: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r+")
        if found.shape == (ntotal, dim) and found.dtype == np.dtype(dtype):
            return found
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=(ntotal, dim))


def open_vectors(directory: Path) -> npt.NDArray[Any]:
    """The matrix, read-only; plain view of the map (numpy's memmap class makes every slice dearer)."""
    return np.asarray(np.load(directory / FILE, mmap_mode="r"))
