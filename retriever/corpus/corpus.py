"""The corpus: one JSON object per line, read through a memory map by byte offsets, without passages in memory.

The index directory has `offsets.npy` (int64 [n], start of each line), `id_hashes.npy` (uint64 [n], sorted) and
`id_rows.npy` (int64 [n], the rows in the order of the hashes): 24 bytes per passage on disk.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.runtime.files import reading
from protocol.runtime.records import MAX_RECORD
from protocol.search import Passage
from retriever.corpus.formats.base import MAX_FIELDS, cleaned, fields_of

_OFFSETS, _HASHES, _ROWS = "offsets.npy", "id_hashes.npy", "id_rows.npy"
SCAN_FILES = (_OFFSETS, _HASHES, _ROWS)
"""Files written by `scan_corpus`."""
_UNSORTED = "id_hashes.unsorted.npy"
_OWN = frozenset({"id", "contents"})
_BOM = b"\xef\xbb\xbf"
_SORT_ROWS = 1 << 21
"""Ids sorted at a time: 64 MiB of memory."""
_CODES = {"int64": "q", "uint64": "Q"}
_BUFFER_ITEMS = 1 << 16


class Corpus:
    """Maps rows and ids to passages. Thread-safe."""

    def __init__(self, path: Path, directory: Path) -> None:
        """`directory`: output of `scan_corpus` for exactly this file."""
        with open_corpus(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = open_offsets(directory)
        self._hashes = np.load(directory / _HASHES, mmap_mode="r")
        self._rows = np.load(directory / _ROWS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._offsets)

    def passage(self, row: int) -> Passage:
        """Return the passage of a row in [0, len). Raises IndexError outside, also for -1."""
        if not 0 <= row < len(self._offsets):
            raise IndexError(f"row {row} is outside a corpus of {len(self._offsets)} passages")
        start = int(self._offsets[row])
        end = self._map.find(b"\n", start)
        return parse_line(self._map[start : end if end >= 0 else len(self._map)])

    def find(self, passage_id: str) -> Passage | None:
        """Return the first passage with this id, or None."""
        wanted = np.uint64(_id_hash(cleaned(passage_id)))
        place = int(np.searchsorted(self._hashes, wanted))
        while place < len(self._hashes) and self._hashes[place] == wanted:
            passage = self.passage(int(self._rows[place]))
            if passage.id == passage_id:
                return passage
            place += 1
        return None


@dataclass(frozen=True)
class CorpusScan:
    """Result of one pass over a corpus file. `sha256` is in hexadecimal; `fields` are the names of further fields in
    order of appearance, up to a limit."""

    passages: int
    bytes: int
    sha256: str
    fields: tuple[str, ...] = ()


def scan_corpus(path: Path, directory: Path, progress: Callable[[int, int], None] | None = None) -> CorpusScan:
    """Read a corpus once and write offsets and ids into `directory`. Memory does not grow with the corpus.

    `progress` is called with (bytes, passages) read so far, after every passage. Blank lines are skipped. Raises
    UserError that names the first bad line.
    """
    digest, end, passages = hashlib.sha256(), 0, 0
    fields: dict[str, None] = {}
    unsorted = directory / _UNSORTED
    with (
        open_corpus(path).open("rb") as file,
        ColumnWriter(directory / _OFFSETS, np.int64) as offsets,
        ColumnWriter(unsorted, np.uint64) as hashes,
    ):
        for number, line in _lines(file, path):
            start, end = end, end + len(line)
            digest.update(line)
            if not line.strip():
                continue
            offsets.append(start)
            passage_id, _, record = _checked(line, number, path)
            hashes.append(_id_hash(passage_id))
            if len(record) > len(_OWN) and len(fields) < MAX_FIELDS:
                fields |= dict.fromkeys(fields_of(record, _OWN))
            passages += 1
            if progress is not None:
                progress(end, passages)
    _sort_ids(np.load(unsorted, mmap_mode="r"), directory)
    unsorted.unlink()
    return CorpusScan(passages, end, digest.hexdigest(), tuple(fields)[:MAX_FIELDS])


def read_texts(path: Path, offset: int = 0) -> Generator[str, None, None]:
    """Yield the contents of every passage in order, from the line that starts at byte `offset`."""
    with open_corpus(path).open("rb") as file:
        file.seek(offset)
        for number, line in _lines(file, path):
            if line.strip():
                yield _checked(line, number, path)[1]


def open_offsets(directory: Path) -> npt.NDArray[Any]:
    """Return int64 [n], memory-mapped: the start of each row's line."""
    return np.asarray(np.load(directory / _OFFSETS, mmap_mode="r"))


def parse_line(line: bytes) -> Passage:
    """Parse one line as a passage with its further fields (`formats.base.fields_of`).

    Raises ValueError with the reason. Lone surrogates, which JSON can spell and UTF-8 cannot, become `?`.
    """
    passage_id, contents, record = _read(line)
    return Passage(id=passage_id, contents=contents, **fields_of(record, _OWN))


def open_corpus(path: Path) -> Path:
    """Return `path`. Raises UserError if it cannot be read."""
    todo = 'set retriever.corpus (or --corpus) to a file of {"id", "contents"} lines'
    with reading(f"the corpus {path}", todo):
        path.open("rb").close()
    return path


class ColumnWriter:
    """Writes a one-dimensional array item by item in numpy's format, in constant memory.

    `with ColumnWriter(path, np.int64) as column: column.append(3)`. The file is readable once it is closed.
    """

    def __init__(self, path: Path, dtype: type[np.int64] | type[np.uint64]) -> None:
        self._dtype = np.dtype(dtype)
        self._buffer = array(_CODES[self._dtype.name])
        self._count = 0
        self._file = path.open("w+b")
        self._data_at = self._write_header()

    def _write_header(self) -> int:
        # numpy pads headers, so that a longer shape takes the same space; `close` relies on this
        header: dict[str, Any] = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._count,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def append(self, value: int) -> None:
        """Write one item."""
        self._buffer.append(value)
        if len(self._buffer) >= _BUFFER_ITEMS:
            self._flush()

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Write several items."""
        self._flush()
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._count += len(values)

    def _flush(self) -> None:
        self._file.write(self._buffer.tobytes())
        self._count += len(self._buffer)
        del self._buffer[:]

    def close(self) -> None:
        """Flush the buffer, and write the number of items into the header."""
        self._flush()
        self._file.seek(0)
        if self._write_header() != self._data_at:
            raise RuntimeError("this version of numpy does not pad array headers")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def _read(line: bytes) -> tuple[str, str, dict[str, Any]]:
    """Return id, contents and the whole record."""
    try:
        record = json.loads(line.removeprefix(_BOM))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found a {type(record).__name__}")
    missing = [key for key in ("id", "contents") if key not in record]
    if missing:
        raise ValueError(f"missing {' and '.join(missing)}; it has {sorted(record)}")
    passage_id, contents = record["id"], record["contents"]
    if not isinstance(contents, str) or not isinstance(passage_id, str | int):
        raise ValueError("`contents` must be a string, `id` a string or an integer")
    return cleaned(str(passage_id)), cleaned(contents), record


def _id_hash(passage_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line). Raises UserError for a line beyond MAX_RECORD, before it is in memory."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD + 1), b""), start=1):
        if len(line) > MAX_RECORD:
            raise _invalid(number, path, f"it has more than {MAX_RECORD:,} bytes")
        yield number, line


def _invalid(number: int, path: Path, why: str) -> UserError:
    todo = 'every line must be a JSON object with "id" and "contents"'
    return UserError(f"line {number} of {path} is not a valid passage", why=why, todo=todo)


def _checked(line: bytes, number: int, path: Path) -> tuple[str, str, dict[str, Any]]:
    try:
        return _read(line)
    except ValueError as error:
        raise _invalid(number, path, str(error)) from None


def _sort_ids(hashes: npt.NDArray[np.uint64], directory: Path) -> None:
    """Write the sorted hashes with their rows, one range of hashes at a time to bound memory."""
    bits = max(1, int(np.ceil(np.log2(max(len(hashes), 1) / _SORT_ROWS + 1))))
    with ColumnWriter(directory / _HASHES, np.uint64) as ordered, ColumnWriter(directory / _ROWS, np.int64) as places:
        for prefix in range(1 << bits):
            rows = _rows_with(hashes, prefix, bits)
            part = hashes[rows]
            order = np.argsort(part, kind="stable")
            ordered.extend(part[order])
            places.extend(rows[order])


def _rows_with(hashes: npt.NDArray[np.uint64], prefix: int, bits: int) -> npt.NDArray[np.int64]:
    shift, found = np.uint64(64 - bits), [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(hashes), _SORT_ROWS):
        block = hashes[start : start + _SORT_ROWS]
        found.append(np.flatnonzero((block >> shift) == prefix).astype(np.int64) + start)
    return np.concatenate(found)
