"""The scanned corpus as what an index is built from: texts by streaming, vectors by a resumable pass of the encoder.

Rows are encoded in chunks that begin at multiples of ENCODE_CHUNK, also after an interruption, so that a resumed build
writes the bytes that an uninterrupted one writes. They are written with plain writes and not through a memory map: a
full disk is then an error in words and not a SIGBUS, and no dirty page counts as the builder's memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from retriever.build_journal import Journal
from retriever.build_progress import BuildProgress, Pass
from retriever.config_encoder import EncoderSettings
from retriever.corpus import Scan, offsets_of, read_texts
from retriever.encoder.base import Encoder, Vectors
from retriever.index import store

ENCODE_CHUNK = 1024
"""Passages encoded at a time."""
JOURNAL_ROWS, JOURNAL_S = 8192, 5.0
"""Rows, or seconds, after which what was encoded is made durable: the most that a kill can cost."""


class BuildSource:
    """See `index.base.Source`. `directory` is the building directory; it holds the scan's files."""

    def __init__(self, corpus: Path, directory: Path, scan: Scan, journal: Journal, progress: BuildProgress) -> None:
        self._corpus, self._directory, self._scan = corpus, directory, scan
        self._journal, self._progress = journal, progress

    @property
    def num_passages(self) -> int:
        """Rows of the index."""
        return self._scan.passages

    def texts(self) -> Iterator[str]:
        """Contents of every passage in the order of its row, from the start."""
        with self._progress.passing("texts") as report, closing(read_texts(self._corpus)) as texts:
            for row, text in enumerate(texts):
                if row % ENCODE_CHUNK == 0:
                    report(row / self.num_passages, row)
                yield text
            report(1.0, self.num_passages)

    def vectors(self, settings: EncoderSettings, dtype: Literal["float32", "float16"], directory: Path) -> None:
        """See `index.base.Source`."""
        path = directory / store.FILE
        name = path.relative_to(self._directory).as_posix()
        encoder = settings.build()
        identity: dict[str, object] = {
            "corpus": self._scan.sha256,
            "encoder": settings.identity(),
            "shape": [self.num_passages, encoder.dim],
            "dtype": dtype,
        }
        done = self._rows_done(name, path, identity)
        matrix = store.create(directory, self.num_passages, encoder.dim, dtype)
        data_at = matrix.offset if isinstance(matrix, np.memmap) else 0
        del matrix
        with path.open("r+b", buffering=0) as file, self._progress.passing("vectors") as report:
            file.seek(data_at + done * encoder.dim * np.dtype(dtype).itemsize)
            self._encode(encoder, np.dtype(dtype), done, file.fileno(), _Promise(self._journal, name, identity), report)

    def _rows_done(self, name: str, path: Path, identity: dict[str, object]) -> int:
        """Rows that an earlier builder made of the same corpus with the same encoder."""
        was, rows = self._journal.rows(name)
        if not rows or not path.exists():
            return 0
        if was != identity:
            changed = ", ".join(key for key in identity if was.get(key) != identity[key])
            self._progress.say(f"{rows:,} rows of {name} were made otherwise ({changed} changed): starting afresh")
            path.unlink()
            return 0
        self._progress.say(f"going on at row {rows:,} of {self.num_passages:,} of {name}")
        return rows

    def _encode(
        self, encoder: Encoder, dtype: np.dtype[np.generic], row: int, fd: int, promise: _Promise, report: Pass
    ) -> None:
        report(row / self.num_passages, row)
        if row == self.num_passages:
            return
        with closing(read_texts(self._corpus, int(offsets_of(self._directory)[row]))) as texts:
            while chunk := list(islice(texts, ENCODE_CHUNK)):
                block = encoder.encode_passages(chunk)
                _check(block, row, len(chunk), encoder.dim)
                _write(fd, np.ascontiguousarray(block, dtype=dtype))
                row += len(chunk)
                promise.at(row, fd, last=row == self.num_passages)
                report(row / self.num_passages, row)
        if row != self.num_passages:
            raise UserError(f"{self._corpus} has changed while it was being indexed", todo="build again")


def _check(block: Vectors, row: int, count: int, dim: int) -> None:
    if block.shape != (count, dim) or not np.isfinite(block).all():
        raise UserError(
            f"the encoder's vectors of rows {row} to {row + count - 1} are no good",
            why=f"shape {block.shape} where ({count}, {dim}) is needed, or values that are not finite",
            todo="look at the encoder's model and dtype",
        )


class _Promise:
    """Makes rows durable and then says so in the journal, now and then."""

    def __init__(self, journal: Journal, name: str, identity: dict[str, object]) -> None:
        self._journal, self._name, self._identity = journal, name, identity
        self._rows, self._time = 0, time.monotonic()

    def at(self, row: int, fd: int, *, last: bool) -> None:
        """The rows before `row` have been written to `fd`."""
        now = time.monotonic()
        if not last and row - self._rows < JOURNAL_ROWS and now - self._time < JOURNAL_S:
            return
        os.fdatasync(fd)
        self._journal.wrote(self._name, self._identity, row)
        self._rows, self._time = row, now


def _write(fd: int, block: npt.NDArray[Any]) -> None:
    left = block.data.cast("B")
    while left:
        left = left[os.write(fd, left) :]
