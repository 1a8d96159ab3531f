"""Parquet, row group by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from retriever.formats.base import Record

_ROWS = 1024
_WANTED = {"id", "_id", "title", "text", "contents", "context", "question", "paragraphs"}
"""Columns that some format reads: dumps often hold others (vectors!) that would only cost time."""


def columns_of(path: Path) -> list[str]:
    """Names of the columns of a file; OSError for one that is damaged."""
    try:
        return list(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def parquet_records(path: Path, progress: Callable[[float], None]) -> Iterator[tuple[int, Record]]:
    """(number from 1, record) of every row. Holds one batch of rows; OSError for a file that is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _WANTED]
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns or None):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
                progress(number / total)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None
