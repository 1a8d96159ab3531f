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
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
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
_ROWS = 1024
_CHUNK = 1 << 20
_MAX_RECORD = 1 << 26
"""Characters of one record of a JSON array beyond which it counts as damaged."""
_BLANK = " \t\r\n"
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


class RecordReader:
    """The records of one file.

    Args:
        path: the file.
        kind: words for its error messages.
        wanted: columns of a parquet or Arrow file to read besides those of scalars; None for all.

    `fraction` is the share that has been read, `unit` what the numbers count: "line", "row" or "record".
    """

    def __init__(self, path: Path, kind: RecordKind, wanted: Collection[str] | None = None) -> None:
        self.path, self.kind, self.wanted = path, kind, wanted
        self.fraction, self.unit = 0.0, "line"

    def __iter__(self) -> Generator[Where, None, None]:
        """Raises UserError for an unreadable file, or with the number of a record that is not a JSON object."""
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
        if TABLES & set(self.path.suffixes[-2:]):
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as table:
                yield from self._table(table, tick)
            return
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n") as text:
            head = ""
            while not head.strip(_BLANK) and (piece := text.read(_CHUNK)):
                head += piece
            read = self._array if head.lstrip(_BLANK).startswith("[") else self._lines
            yield from read(head, text, tick)

    def _lines(self, head: str, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        number, rest = 0, head
        while rest:
            lines = rest.split("\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                if line.strip(_BLANK):
                    yield number, self._object(line, number)
            tick()
            piece = text.read(_CHUNK)
            if not piece:
                if rest.strip(_BLANK):
                    yield number + 1, self._object(rest, number + 1)
                return
            rest += piece

    def _object(self, line: str, number: int) -> Record:
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._bad(number, f"not JSON: {error}") from None
        return self._mapping(value, number)

    def _mapping(self, value: Any, number: int) -> Record:
        if not isinstance(value, dict):
            raise self._bad(number, f"expected an object, found a {type(value).__name__}")
        return value

    def _bad(self, number: int, why: str) -> UserError:
        what = f"{self.unit} {number} of {self.path} is not a valid {self.kind.item}"
        return UserError(what, why=why, todo="correct or remove it")

    def _array(self, head: str, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        self.unit = "record"
        decoder, number = json.JSONDecoder(), 1
        buffer, at = head, head.index("[") + 1
        while True:
            at = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
            if buffer.startswith("]", at):
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
            except RecursionError as error:
                raise self._bad(number, f"not JSON: {error}") from None
            except ValueError as error:
                piece = text.read(_CHUNK)
                if not piece or len(buffer) - at > _MAX_RECORD:
                    raise self._bad(number, f"not JSON: {error}") from None
                # only here: cutting off each record would copy the rest of the buffer
                buffer, at = buffer[at:] + piece, 0
                tick()
                continue
            yield number, self._mapping(value, number)
            number, at = number + 1, end

    def _table(self, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        head = text.readline()
        delimiter = "\t" if "\t" in head else ","
        names = next(csv.reader([head], delimiter=delimiter), [])
        first = 2
        if len(names) == 2 and names[1].lstrip().startswith("["):
            # DPR's questions: no header, a text and a Python list of answers
            names, first = ["question", "answers"], 1
            text.seek(0)
        for number, row in enumerate(csv.DictReader(text, fieldnames=names, delimiter=delimiter), start=first):
            if number % 1024 == 0:
                tick()
            if None in row:
                raise self._bad(number, "it has more fields than the header")
            yield number, row


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
            columns = _columns(file.schema_arrow, wanted)
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns or None):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
                progress(number / total)
    except pa.ArrowInvalid as error:
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
                for record in batch.select(columns or reader.schema.names).to_pylist():
                    number += 1
                    yield number, record
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def _columns(schema: Any, wanted: Collection[str] | None) -> list[str]:
    """Return the columns to read: `wanted` and those of scalars, because dumps often contain vectors; None: all."""
    return [field.name for field in schema if wanted is None or field.name in wanted or _is_scalar_column(field.type)]


def _is_scalar_column(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)
