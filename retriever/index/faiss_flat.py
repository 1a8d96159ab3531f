"""Exact inner product with FAISS on CPUs, directly on the memory map: no copies, and replicas share the pages.

The map is `vectors.npy` or a FAISS file built elsewhere, which is refused unless
it ranks by inner product and its rows are 0 .. ntotal-1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.encoder import build_encoder
from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import Hits, PassageSource, Rows, Scores
from retriever.index.config import DenseBase, FileBase
from retriever.index.dense import DenseIndex, OverStoredVectors, StoredVectors, search_candidates

SPARE = 8
"""Extra candidates beyond k requested from FAISS."""
# FAISS scans vector by vector for batches below this many queries, and its default (128000 distances, in effect batches
# of up to about 128) is 16 times slower at 64 queries than its BLAS path (measured, 100k x 768).
_BLAS_FROM = 4
_WIDENED_BYTES = 8 << 20
"""float16 vectors widened at a time: few enough for the cache, enough for a matrix product."""
_READ = """
import os, resource, sys
import faiss
path = sys.argv[1]
if os.path.exists("/proc/self/statm"):
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = held + 2 * os.path.getsize(path) + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faiss.read_index(path, faiss.IO_FLAG_MMAP_IFC)
"""
"""Program of the child process. Memory is limited, because a file's data cannot exceed its size."""
_ALL_THREADS: int = faiss.omp_get_max_threads()


class FaissFlatIndex(DenseIndex):
    """An encoder with a flat FAISS index."""

    def __init__(self, settings: FileBase, directory: Path, *, threads: int) -> None:
        super().__init__(build_encoder(settings.encoder), open_flat(settings, directory, threads=threads))

    @staticmethod
    def build(settings: FileBase, source: PassageSource, directory: Path) -> None:
        """Build the vectors from the corpus, or check the configured file."""
        if settings.file is None:
            source.vectors(settings.encoder, settings.dtype, directory)
            return
        check_readable(settings.file)
        check_fits(settings.file, open_flat_file(settings.file).shape, settings, source)


class FaissFlatVectors(OverStoredVectors):
    """Flat search over vectors [ntotal, dim], C order. The thread count applies to the opening thread."""

    def __init__(self, vectors: StoredVectors, *, threads: int) -> None:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
        use_threads(threads)
        super().__init__(vectors)

    def search(self, queries: Vectors, k: int) -> Hits:
        """See `base.VectorIndex`."""
        return search_candidates(self._rough, self._vectors, np.ascontiguousarray(queries), k, SPARE)

    def _rough(self, queries: Vectors, count: int) -> tuple[Scores, Rows]:
        """Return best first. float16 vectors are widened block by block."""
        if self._vectors.dtype == np.float32:
            scores, rows = faiss.knn(queries, self._vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
            return scores, rows
        heap = faiss.ResultHeap(len(queries), count, keep_max=True)
        for first, block in store.blocks(self._vectors, block_bytes=_WIDENED_BYTES):
            scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            heap.add_result(scores, rows + first)
        heap.finalize()
        return heap.D, heap.I


def open_flat(settings: FileBase, directory: Path, *, threads: int) -> FaissFlatVectors:
    """Open the configured file, or the output of `build`."""
    vectors = store.open_vectors(directory) if settings.file is None else open_flat_file(settings.file)
    return FaissFlatVectors(vectors, threads=threads)


def open_flat_file(path: Path) -> StoredVectors:
    """Return the vectors in a file, memory-mapped."""
    index = open_file(path, (faiss.IndexFlat, faiss.IndexScalarQuantizer), "a flat index")
    vectors = stored_vectors(index)
    if vectors is None:
        raise UserError(
            f"the vectors in {path} are quantised further than float16",
            todo="build it as a Flat or SQfp16 index",
        )
    return vectors


def open_file(path: Path, kind: type[Any] | tuple[type[Any], ...], wanted: str) -> Any:
    """Open the FAISS index in `path`, downcast. Raises UserError unless it has the FAISS class `kind` (described by
    `wanted`)."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"cannot read {path} as a FAISS index",
            why=str(error).strip().rpartition("\n")[2][:300],
            todo="set index.file to a file written by faiss.write_index",
        ) from None
    name = type(index).__name__
    if not isinstance(index, kind):
        raise UserError(
            f"{path} contains a {name}, not {wanted}",
            todo="set the matching index.type: faiss_flat, faiss_hnsw, faiss_ivf or faiss_ivfpq",
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(
            f"{path} does not use the inner product",
            why=f"FAISS metric {index.metric_type}",
            todo="rebuild it with faiss.METRIC_INNER_PRODUCT over normalised vectors, as Search-R1 does",
        )
    return index


def stored_vectors(index: Any) -> StoredVectors | None:
    """Return the vectors inside an opened index as a view [ntotal, d] that keeps it open, None if it has no full
    vectors.

    float32, or float16 for a float16 scalar quantiser. In a file they start at an odd offset, which does not slow FAISS
    (measured: 200k x 384), but numpy's matrix product would copy everything (see `store.blocks`).
    """
    holder = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    if isinstance(holder, faiss.IndexFlat):
        numbers: StoredVectors = faiss.rev_swig_ptr(holder.get_xb(), holder.ntotal * holder.d)
    elif isinstance(holder, faiss.IndexScalarQuantizer) and holder.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
        numbers = faiss.rev_swig_ptr(holder.codes.data(), holder.ntotal * holder.code_size).view(np.float16)
    else:
        return None
    return np.asarray(_OwnedArray(numbers.reshape(holder.ntotal, holder.d), index))


class _OwnedArray:
    """An array over memory that `owner` frees: numpy arrays derived from it keep it alive."""

    def __init__(self, array: StoredVectors, owner: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owner = owner


def check_readable(path: Path) -> None:
    """Raise UserError if FAISS crashes on a file. FAISS trusts mapped data: a truncated download would crash this
    process, and a damaged length would exhaust the memory.

    The file is first read in a child process (a quarter of a second).
    """
    # not in the working directory: do not import from there
    done = subprocess.run([sys.executable, "-I", "-c", _READ, str(path.absolute())], capture_output=True, cwd="/")
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise UserError(
            f"cannot read {path} as a FAISS index",
            why=message
            if done.returncode > 0
            else f"FAISS crashes on it (signal {-done.returncode}): the file is truncated or damaged",
            todo="compare its size with the source; index.file must be a file written by faiss.write_index",
        )


def check_fits(path: Path, shape: tuple[int, int], settings: DenseBase, source: PassageSource) -> None:
    """Raise UserError unless the file's vectors [ntotal, dim] match the passages and the encoder's dimension."""
    ntotal, width = shape
    dim = build_encoder(settings.encoder).dim
    if ntotal != source.num_passages:
        raise UserError(
            f"{path} does not match this corpus",
            why=f"{ntotal:,} rows in the file, {source.num_passages:,} passages in the corpus",
            todo="set the corpus that the file was built from",
        )
    if width != dim:
        raise UserError(
            f"{path} does not match this encoder",
            why=f"its vectors have dimension {width}, the encoder's {dim}",
            todo="set index.encoder to the model that encoded the file",
        )


def use_threads(threads: int) -> None:
    """Set the threads of FAISS calls made by this thread; 0: OMP_NUM_THREADS, or one per core."""
    faiss.omp_set_num_threads(threads or _ALL_THREADS)
