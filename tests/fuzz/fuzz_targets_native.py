"""Decoders whose parser is a library's native code: FAISS files, numpy files, parquet."""

from __future__ import annotations

import io
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_targets import Decoder, scratch

from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.runtime.records import RecordReader
from retriever.corpus.formats.base import COLUMNS, PASSAGES
from retriever.index.faiss_flat import open_file, stored_vectors
from tests.support.format_samples import QUESTIONS

REFUSED = 3


def _faiss(path: Path) -> Callable[[bytes], object]:
    kinds = (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexHNSW, faiss.IndexIVF)

    def read(raw: bytes) -> object:
        path.unlink(missing_ok=True)  # a map of the file before may still be open
        path.write_bytes(raw)
        # what `check_readable` does in a process of its own is done in a fork here: hundreds of times as fast
        child = os.fork()
        if not child:
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + (128 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
            os._exit(_ending(lambda: stored_vectors(open_file(path, kinds, "an index"))))
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended < 0:
            raise Dies(f"signal {-ended}")
        if ended == REFUSED:
            raise UserError("refused")
        assert ended == 0, "neither read nor refused"
        return ended

    return read


class Dies(Exception):
    """FAISS crashed on the file: `check_readable` detects that before the retriever reads it."""


def _ending(work: Callable[[], object]) -> int:
    try:
        work()
    except UserError:
        return REFUSED
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _parquet(path: Path) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return list(RecordReader(path, PASSAGES, COLUMNS))

    return read


def _question_rows(path: Path) -> Callable[[bytes], object]:
    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return load_questions(path)

    return read


def _index(index: Any) -> bytes:
    if not index.is_trained:
        index.train(np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    index.add(np.eye(4, dtype=np.float32))
    raw: bytes = faiss.serialize_index(index).tobytes()
    return raw


def decoders() -> tuple[Decoder, ...]:
    folder = scratch()
    inner = faiss.METRIC_INNER_PRODUCT
    flat, half = faiss.IndexFlatIP(4), faiss.IndexScalarQuantizer(4, faiss.ScalarQuantizer.QT_fp16, inner)
    graph, lists = faiss.IndexHNSWFlat(4, 4, inner), faiss.IndexIVFFlat(faiss.IndexFlatIP(4), 4, 2, inner)
    table, written = pa.table({"id": ["a", "b"], "text": ["c", "d"], "title": ["e", None]}), io.BytesIO()
    pq.write_table(table, written)
    rows = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([QUESTIONS["search_r1"][0][0]]), rows)
    return (
        Decoder("faiss.flat", _faiss(folder / "a"), (UserError, Dies), [_index(flat), _index(half)], share=0.3),
        Decoder("faiss.hnsw", _faiss(folder / "b"), (UserError, Dies), [_index(graph)], share=0.2),
        Decoder("faiss.ivf", _faiss(folder / "c"), (UserError, Dies), [_index(lists)], share=0.2),
        Decoder("questions.parquet", _question_rows(folder / "e.parquet"), (UserError,), [rows.getvalue()], share=0.1),
        Decoder("corpus.parquet", _parquet(folder / "d.parquet"), (UserError,), [written.getvalue()], share=0.1),
    )
