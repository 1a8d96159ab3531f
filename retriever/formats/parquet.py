"""Parquet, row group by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from retriever.formats.base import Record

_ROWS = 1024
_WANTED = {"id", "_id", "title", "text", "contents", "context", "question", "paragraphs"}
"""Columns that some format reads."""


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
            # of the others only what a passage can carry: dumps often hold vectors
            columns = [field.name for field in file.schema_arrow if field.name in _WANTED or _is_scalar(field.type)]
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns or None):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
                progress(number / total)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def _is_scalar(kind: Any) -> bool:
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)
