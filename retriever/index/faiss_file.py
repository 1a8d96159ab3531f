"""FAISS files, ours and those of others: opened through a memory map, with their vectors as a view where they hold any.

A file is refused, in words, unless it ranks by inner product and its rows are 0 .. ntotal-1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from protocol.errors import UserError
from retriever.config_index_base import DenseBase
from retriever.index.base import Source
from retriever.index.dense import Stored


def use_threads(threads: int) -> None:
    """Threads of every FAISS call that this thread makes from now on; 0: one a core."""
    faiss.omp_set_num_threads(threads or os.cpu_count() or 1)


def open_file(path: Path, kind: type[Any] | tuple[type[Any], ...], wanted: str) -> Any:
    """The FAISS index in `path`, downcast. UserError unless it is of the FAISS class `kind`, in words `wanted`."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
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


def check_fits(path: Path, index: Any, settings: DenseBase, source: Source) -> None:
    """UserError unless the file has a row for every passage, as wide as the encoder's vectors."""
    dim = settings.encoder.build().dim
    if index.ntotal != source.num_passages:
        raise UserError(
            f"{path} does not belong to this corpus",
            why=f"{index.ntotal:,} rows in the file, {source.num_passages:,} passages in the corpus",
            todo="give the corpus that the file was built from",
        )
    if index.d != dim:
        raise UserError(
            f"{path} does not belong to this encoder",
            why=f"its vectors have {index.d} numbers, the encoder's {dim}",
            todo="set index.encoder to the model that encoded the file",
        )


def stored_vectors(index: Any) -> Stored | None:
    """The vectors inside an opened index as a view [ntotal, d] that lives as long as it, None where it has none whole.

    float32, or float16 for a float16 scalar quantiser. In a file they begin at an odd offset: FAISS does not mind
    (measured: 200k x 384, the same time), numpy's matrix product would copy all (see `store.blocks`).
    """
    if isinstance(index, faiss.IndexHNSW):
        index = faiss.downcast_index(index.storage)
    shape = (index.ntotal, index.d)
    if isinstance(index, faiss.IndexFlat):
        flat: Stored = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
        return flat.reshape(shape)
    if isinstance(index, faiss.IndexScalarQuantizer) and index.sq.qtype == faiss.ScalarQuantizer.QT_fp16:
        codes: Stored = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
        return codes.view(np.float16).reshape(shape)
    return None
