"""FAISS files, ours and those of others: opened through a memory map, with their vectors as a view where they hold any.

A file is refused, in words, unless it ranks by inner product and its rows are 0 .. ntotal-1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.config_index_base import DenseBase
from retriever.index.base import Source
from retriever.index.dense import Stored

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
"""A file is mapped, and what is read from it is no longer than it."""
_ALL_THREADS: int = faiss.omp_get_max_threads()


def use_threads(threads: int) -> None:
    """Threads of every FAISS call that this thread makes from now on; 0: OMP_NUM_THREADS, or one a core."""
    faiss.omp_set_num_threads(threads or _ALL_THREADS)


def check_survives(path: Path) -> None:
    """UserError where FAISS dies of a file: it believes what it maps, so a download that was cut short would end this
    process, and a damaged length would take all memory.

    Read once in a process of its own (a quarter of a second), before somebody else's file is taken for an index.
    """
    # not in the working directory: what lies there must not be imported
    done = subprocess.run([sys.executable, "-I", "-c", _READ, str(path.absolute())], capture_output=True, cwd="/")
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise UserError(
            f"cannot read {path} as a FAISS index",
            why=told if done.returncode > 0 else f"FAISS dies of it (signal {-done.returncode}): it is cut short",
            todo="give index.file a file that faiss.write_index wrote, and compare its size with that of its source",
        )


def open_file(path: Path, kind: type[Any] | tuple[type[Any], ...], wanted: str) -> Any:
    """The FAISS index in `path`, downcast. UserError unless it is of the FAISS class `kind`, in words `wanted`."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"cannot read {path} as a FAISS index",
            why=str(error).strip().rpartition("\n")[2][:300],
            todo="give index.file a file that faiss.write_index wrote",
        ) from None
    name = type(index).__name__
    if not isinstance(index, kind):
        raise UserError(
            f"{path} holds a {name}, not {wanted}",
            todo="take the index.type of that file: faiss_flat, faiss_hnsw, faiss_ivf or faiss_ivfpq",
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(
            f"{path} ranks by another measure than the inner product",
            why=f"FAISS metric {index.metric_type}",
            todo="build it with faiss.METRIC_INNER_PRODUCT over normalised vectors, as Search-R1 does",
        )
    return index


def check_fits(path: Path, shape: tuple[int, int], settings: DenseBase, source: Source) -> None:
    """UserError unless the file's vectors [ntotal, dim] are one a passage, as wide as the encoder's."""
    ntotal, width = shape
    dim = settings.encoder.build().dim
    if ntotal != source.num_passages:
        raise UserError(
            f"{path} does not belong to this corpus",
            why=f"{ntotal:,} rows in the file, {source.num_passages:,} passages in the corpus",
            todo="give the corpus that the file was built from",
        )
    if width != dim:
        raise UserError(
            f"{path} does not belong to this encoder",
            why=f"its vectors have {width} numbers, the encoder's {dim}",
            todo="set index.encoder to the model that encoded the file",
        )


def stored_vectors(index: Any) -> Stored | None:
    """The vectors inside an opened index as a view [ntotal, d] that keeps it open, None where it has none whole.

    float32, or float16 for a float16 scalar quantiser. In a file they begin at an odd offset: FAISS does not mind
    (measured: 200k x 384, the same time), numpy's matrix product would copy all (see `store.blocks`).
    """
    holder = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    if isinstance(holder, faiss.IndexFlat):
        numbers: Stored = faiss.rev_swig_ptr(holder.get_xb(), holder.ntotal * holder.d)
    elif isinstance(holder, faiss.IndexScalarQuantizer) and holder.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
        numbers = faiss.rev_swig_ptr(holder.codes.data(), holder.ntotal * holder.code_size).view(np.float16)
    else:
        return None
    return np.asarray(_Kept(numbers.reshape(holder.ntotal, holder.d), index))


class _Kept:
    """An array over memory that `owner` frees: numpy arrays made of this one hold on to it."""

    def __init__(self, array: Stored, owner: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owner = owner
