"""Read files of records, of questions or of passages.

Files are JSON lines, one JSON array, either of them in gzip, parquet (row group by row group), Arrow as `datasets`
saves it, or tables (TSV or CSV) with a header. The first bytes of a file determine which; tables are recognised by
their name. A folder is a data set that `datasets` saved, or holds shards of one split.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from protocol.errors import UserError

Record = Mapping[str, Any]
Where = tuple[int, Record]
"""Number of the record (or line), from 1, and the record."""
SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".gz", ".tsv", ".csv"})
TABLES = {".tsv", ".csv"}
SPLITS = frozenset({"train", "dev", "val", "valid", "validation", "test"})
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}\b")
"""Name of a shard of a split, as `datasets` and the Hugging Face hub write it."""
_ROWS = 64
"""Rows of a parquet or Arrow file in memory: each may repeat one large value of a small file."""
_CHUNK = 1 << 20
MAX_RECORD, _MAX_BATCH = 1 << 26, 1 << 28
"""Characters of one line or record, and bytes of `_ROWS` rows, beyond which a file counts as damaged."""
_MAX_LINES = 200
"""Lines of one row of a CSV table."""
_DENSE = 100
"""Compression ratio of a column from which its rows are read one by one."""
_BLANK = " \t\r\n"
_NESTED = re.compile(r'[ \t\r\n]*(?:\{[ \t\r\n]*"Data"[ \t\r\n]*:[ \t\r\n]*)?\[')
"""Start of an array of records, which TriviaQA writes as the value of `Data`, its first key."""
_BETWEEN = re.compile(r"[ \t\r\n,]*")


@dataclass(frozen=True)
class RecordKind:
    """Words for error messages.

    item  one record, e.g. "passage"
    file  the whole, e.g. "corpus"
    todo  what to do about a file that cannot be read
    """

    item: str
    file: str
    todo: str


@dataclass
class RowCount:
    """Count the rows of one reading of one or several files: all of them, and those dropped, by reason.

    skip_invalid  drop invalid rows, instead of raising at the first one
    first         reason -> the first row that was dropped for it
    broken        rows of tables whose fields have line breaks; `first_broken` is the first
    stems         file -> name of the file, unique in this reading, for ids of rows without one
    """

    skip_invalid: bool = False
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    broken: int = 0
    first_broken: str = ""
    stems: dict[Path, str] = field(default_factory=dict)

    @property
    def valid(self) -> int:
        """Return the number of rows that were not dropped."""
        return self.read - self.dropped.total()

    def drop(self, reason: str, row: str) -> None:
        """Count a row that is left out."""
        self.dropped[reason] += 1
        self.first.setdefault(reason, row)

    def refuse(self, error: UserError) -> None:
        """Count an invalid row. Raises `error` instead unless `skip_invalid`."""
        if not self.skip_invalid:
            raise error
        self.drop(error.why.partition(":")[0], error.what)

    def account(self, written: int, rest: str) -> str:
        """Return where all rows went; `rest` says why valid rows were not written."""
        counts = {"written": written, rest: self.valid - written}
        parts = [f"{count} {what}" for what, count in counts.items() if count or what == "written"]
        parts += [f"{count} dropped: {why} (first: {self.first[why]})" for why, count in self.dropped.items()]
        return "; ".join(filter(None, [f"{self.read} rows read: {', '.join(parts)}", self.of_several_lines()]))

    def of_several_lines(self) -> str:
        """Return what to check if fields have line breaks: a quote that is closed by chance takes in other rows."""
        few = (
            f"{self.broken} rows have line breaks in a field (first: {self.first_broken}): check that they are one row"
        )
        return few if self.broken else ""


class RecordReader:
    """The records of one file.

    Args:
        path: the file.
        kind: words for its error messages.
        wanted: columns of a parquet or Arrow file to read besides those of scalars; None for all.
        rows: counts the rows, and decides whether an invalid one is an error.

    `fraction` is the share that has been read, `unit` what the numbers count: "line", "row" or "record".
    """

    def __init__(
        self, path: Path, kind: RecordKind, wanted: Collection[str] | None = None, rows: RowCount | None = None
    ) -> None:
        self.path, self.kind, self.wanted, self.rows = path, kind, wanted, rows or RowCount()
        self.fraction, self.unit = 0.0, "line"

    def __iter__(self) -> Generator[Where, None, None]:
        """Raises UserError for an unreadable file, or with the number of an invalid record (see `RowCount`)."""
        for where in self._records():
            self.rows.read += 1
            yield where

    def _records(self) -> Iterator[Where]:
        try:
            with self.path.open("rb") as file:
                magic = file.read(8)
                if magic[:4] == b"PAR1":
                    self.unit = "row"
                    yield from _parquet_rows(self.path, self.wanted, self._set_fraction)
                    return
                if magic[:6] == b"ARROW1" or self.path.suffix == ".arrow":
                    self.unit = "row"
                    yield from _arrow_rows(self.path, self.wanted, stream=magic[:6] != b"ARROW1")
                    return
                file.seek(0)
                size = max(self.path.stat().st_size, 1)
                binary = cast(IO[bytes], gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file)
                yield from self._text_records(binary, lambda: self._set_fraction(file.tell() / size))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8 text", why=str(error), todo="convert it to UTF-8") from None
        except ImportError as error:
            raise UserError(
                f"{self.path} cannot be read in this environment", why=str(error), todo="pip install pyarrow"
            ) from None
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise UserError(
                f"cannot read the {self.kind.file} {self.path}",
                why=getattr(error, "strerror", None) or str(error),
                todo=self.kind.todo,
            ) from None

    def _set_fraction(self, fraction: float) -> None:
        self.fraction = fraction

    def _text_records(self, binary: IO[bytes], tick: Callable[[], None]) -> Iterator[Where]:
        suffixes = [suffix for suffix in self.path.suffixes if suffix != ".gz"]
        if suffixes and suffixes[-1] in TABLES:
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as table:
                yield from self._table(table, tick)
            return
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n") as text:
            head = next((piece for piece in iter(lambda: text.read(_CHUNK), "") if piece.strip(_BLANK)), "")
            if start := _NESTED.match(head):
                yield from self._array(head, start.end(), text, tick)
                return
            text.seek(0)
            for number, line in enumerate(self._bounded(text), start=1):
                if number % 256 == 0:
                    tick()
                if line.strip(_BLANK):
                    yield from self._line(line, number)

    def _bounded(self, text: IO[str]) -> Iterator[str]:
        """Yield the lines. Raises UserError for one beyond `MAX_RECORD`, which may be a decompression bomb."""
        for number, line in enumerate(iter(lambda: text.readline(MAX_RECORD + 1), ""), start=1):
            if len(line) > MAX_RECORD:
                raise self._bad(number, f"it has more than {MAX_RECORD:,} characters")
            yield line

    def _line(self, line: str, number: int) -> Iterator[Where]:
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._refuse(number, f"not JSON: {error}")
            return
        yield from self._mapping(value, number)

    def _mapping(self, value: Any, number: int) -> Iterator[Where]:
        if isinstance(value, dict):
            yield number, value
        else:
            self._refuse(number, f"expected an object, found a {type(value).__name__}")

    def _refuse(self, number: int, why: str) -> None:
        self.rows.refuse(self._bad(number, why))
        self.rows.read += 1

    def _bad(self, number: int, why: str) -> UserError:
        what = f"{self.unit} {number} of {self.path} is not a valid {self.kind.item}"
        return UserError(what, why=why, todo="correct or remove it")

    def _array(self, buffer: str, at: int, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        self.unit = "record"
        decoder, number, nested = json.JSONDecoder(), 1, buffer.lstrip(_BLANK).startswith("{")
        while True:
            at = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
            if buffer.startswith("]", at):
                rest = chain([buffer[at + 1 :]], iter(lambda: text.read(_CHUNK), ""))
                if not nested and any(piece.strip(_BLANK) for piece in rest):
                    raise self._bad(number, "there is more text after the end of the array")
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
            except RecursionError as error:
                raise self._bad(number, f"not JSON: {error}") from None
            except ValueError as error:
                # twice as much each time: the start of a long record is parsed again
                piece = text.read(max(_CHUNK, len(buffer) - at))
                if not piece or len(buffer) - at > MAX_RECORD:
                    raise self._bad(number, f"not JSON: {error}") from None
                # only here: cutting off each record would copy the rest of the buffer
                buffer, at = buffer[at:] + piece, 0
                tick()
                continue
            yield from self._mapping(value, number)
            number, at = number + 1, end

    def _table(self, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        lines = self._bounded(text)
        head = next(lines, "")
        width = head.count("\t") + 1
        rows = self._comma_rows(chain([head], lines)) if width == 1 else _tab_rows(chain([head], lines), width)
        _, names = next(rows, (1, list[str]()))
        if len(names) == 2 and names[1].lstrip().startswith("["):
            # DPR's questions: no header, a text and a Python list of answers
            rows, names = chain([(1, names)], rows), ["question", "answers"]
        for count, (number, row) in enumerate(rows):
            if count % 1024 == 0:
                tick()
            if len(row) == len(names):
                yield number, dict(zip(names, row, strict=True))
            else:
                self._refuse(number, f"it has {len(row)} fields, the header has {len(names)}")

    def _comma_rows(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of its first line, fields) of each row. Raises UserError where a quote is not closed."""
        reader, number = csv.reader(lines, strict=True), 1
        while True:
            try:
                if row := next(reader):
                    self._check_lines(number, reader.line_num)
                    yield number, row
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num > number:  # the lines since then are rows that the quote has swallowed
                    raise self._bad(number, f"{error}; a quote in it is not closed") from None
                self._refuse(number, f"{error}")
            number = reader.line_num + 1

    def _check_lines(self, first: int, last: int) -> None:
        """Count a row of several lines. Raises UserError for more than _MAX_LINES."""
        if last - first >= _MAX_LINES:
            also = "use JSON lines or parquet for long texts"
            raise self._bad(first, f"a quote in it is closed {last - first} lines later; {also}")
        if last > first:
            self.rows.broken += 1
            self.rows.first_broken = self.rows.first_broken or f"lines {first} to {last} of {self.path}"


def _tab_rows(lines: Iterable[str], width: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (number, fields) of each line.

    Quotes count only in a line that is a row of `width` fields with them: most TSV files have none, and text that
    begins with a quote. A field has no line break.
    """
    for number, line in enumerate(lines, start=1):
        if not (line := line.rstrip("\r\n")):
            continue
        try:
            row = next(csv.reader([line], delimiter="\t", strict=True)) if '"' in line else []
        except csv.Error:
            row = []
        yield number, row if len(row) == width else line.split("\t")


def record_files(path: Path, kind: RecordKind, *, one_split: bool = False) -> tuple[Path, ...]:
    """Return the files of a data set: `path` itself, or those of a folder in order.

    In a folder of several splits, `FOLDER/SPLIT` names one of them. Raises UserError if there are none; with
    `one_split`, also for files of several splits: a test set must not be trained on because a folder was named.
    """
    if (path / "dataset_dict.json").is_file():
        raise _several(path, [child.name for child in path.iterdir() if child.is_dir()])
    if path.is_dir():
        found = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES and f.is_file() and not f.name.startswith("."))
        if (path / "state.json").is_file():
            found = [file for file in found if file.suffix == ".arrow"]
        splits = {split for file in found if (split := _split_of(file))}
        if not found:
            raise UserError(
                f"no {kind.file} found in {path}", why="no file ends in " + ", ".join(sorted(SUFFIXES)), todo=kind.todo
            )
        if one_split and len(splits) > 1:
            raise _several(path, splits)
        return tuple(found)
    if not path.exists() and path.parent.is_dir():
        found = [f for f in path.parent.iterdir() if f.suffix in SUFFIXES and _split_of(f) == path.name]
        if found:
            return tuple(sorted(found))
    return (path,)


def _split_of(file: Path) -> str:
    """Return the split that a file name states: "train" for train.jsonl and train-00000-of-00002.parquet; else ""."""
    shard = _SHARD.match(file.name)
    stem = file.name.partition(".")[0]
    return shard[1] if shard else stem if stem in SPLITS else ""


def _several(path: Path, splits: Collection[str]) -> UserError:
    names = sorted(splits, key=lambda name: (name != "train", name))
    return UserError(f"{path} holds several splits: {', '.join(names)}", todo=f"name one of them: {path / names[0]}")


def _parquet_rows(path: Path, wanted: Collection[str] | None, progress: Callable[[float], None]) -> Iterator[Where]:
    """Yield the rows. Keeps one batch of them in memory. Raises OSError for a damaged file."""
    import pyarrow as pa  # 50 MB of memory that a service does not need
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns, meta = _columns(file.schema_arrow, wanted), file.metadata
            groups = [meta.row_group(n) for n in range(meta.num_row_groups)]
            chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
            dense = any(c.total_uncompressed_size > _CHUNK + _DENSE * c.total_compressed_size for c in chunks)
            number = 0
            for batch in file.iter_batches(batch_size=1 if dense else _ROWS, columns=columns or None):
                yield from _batch_rows(batch, number)
                number += batch.num_rows
                progress(number / max(meta.num_rows, 1))
    except (pa.lib.ArrowException, MemoryError) as error:
        raise OSError(str(error)) from None


def _arrow_rows(path: Path, wanted: Collection[str] | None, *, stream: bool) -> Iterator[Where]:
    """Yield the rows of an Arrow file: of the stream format, which `datasets` writes, or of the file format."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)
            columns = _columns(reader.schema, wanted)
            batches = reader if stream else (reader.get_batch(n) for n in range(reader.num_record_batches))
            number = 0
            for batch in batches:
                yield from _batch_rows(batch.select(columns or reader.schema.names), number)
                number += batch.num_rows
    except (pa.lib.ArrowException, MemoryError) as error:
        raise OSError(str(error)) from None


def _batch_rows(batch: Any, before: int) -> Iterator[Where]:
    """Yield the rows of a batch, few at a time, and large ones one by one. Raises OSError for too large ones."""
    for start in range(0, batch.num_rows, _ROWS):
        part = batch.slice(start, _ROWS)
        if part.nbytes > _MAX_BATCH:
            first = before + start + 1
            raise OSError(f"rows {first} to {first + part.num_rows - 1} have {part.nbytes:,} bytes")
        step = 1 if part.nbytes > _CHUNK * 4 else _ROWS
        records = (row for at in range(0, part.num_rows, step) for row in part.slice(at, step).to_pylist())
        yield from enumerate(records, start=before + start + 1)


def _columns(schema: Any, wanted: Collection[str] | None) -> list[str]:
    """Return the columns to read: `wanted` and those of scalars, because dumps often contain vectors; None: all."""
    return [field.name for field in schema if wanted is None or field.name in wanted or _is_scalar_column(field.type)]


def _is_scalar_column(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)
