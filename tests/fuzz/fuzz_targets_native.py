"""Decoders whose parser is a library's native code: FAISS files, numpy files, parquet."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_targets import Decoder

from protocol.errors import UserError
from retriever.formats.records import Records
from retriever.index.faiss_file import open_file, stored_vectors


def _faiss(path: Path) -> Callable[[bytes], object]:
    kinds = (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexHNSW, faiss.IndexIVF)

    def read(raw: bytes) -> object:
        path.unlink(missing_ok=True)  # a map of the file before may still be open
        path.write_bytes(raw)
        index = open_file(path, kinds, "an index")
        vectors: Any = stored_vectors(index)
        return None if vectors is None else vectors.shape

    return read


def _parquet(path: Path) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return list(Records(path))

    return read


def _index(index: Any) -> bytes:
    if not index.is_trained:
        index.train(np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    index.add(np.eye(4, dtype=np.float32))
    raw: bytes = faiss.serialize_index(index).tobytes()
    return raw


def decoders() -> tuple[Decoder, ...]:
    scratch = Path(tempfile.mkdtemp(prefix="foray-fuzz-"))
    inner = faiss.METRIC_INNER_PRODUCT
    flat, half = faiss.IndexFlatIP(4), faiss.IndexScalarQuantizer(4, faiss.ScalarQuantizer.QT_fp16, inner)
    graph, lists = faiss.IndexHNSWFlat(4, 4, inner), faiss.IndexIVFFlat(faiss.IndexFlatIP(4), 4, 2, inner)
    table, written = pa.table({"id": ["a", "b"], "text": ["c", "d"], "title": ["e", None]}), io.BytesIO()
    pq.write_table(table, written)
    return (
        Decoder("faiss.flat", _faiss(scratch / "a"), (UserError,), [_index(flat), _index(half)], share=0.3),
        Decoder("faiss.hnsw", _faiss(scratch / "b"), (UserError,), [_index(graph)], share=0.2),
        Decoder("faiss.ivf", _faiss(scratch / "c"), (UserError,), [_index(lists)], share=0.2),
        Decoder("corpus.parquet", _parquet(scratch / "d.parquet"), (UserError,), [written.getvalue()], share=0.1),
    )
