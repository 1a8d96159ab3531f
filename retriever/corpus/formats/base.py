"""From files to records, and from a record to the documents in it.

Files are JSON lines, one JSON array, either of them in gzip, parquet (row group by row group), or TSV with a header.
The first bytes of a file tell which; TSV is known by its name.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from protocol.errors import UserError

Record = Mapping[str, Any]
Where = tuple[int, Record]
"""Number of the record (of the line, where records are lines), from 1; and the record."""
MAX_FIELDS, MAX_NAME_CHARS, MAX_FIELD_CHARS = 32, 64, 4096
"""Bounds on what a passage carries beside its id and contents: fields, and characters of a name and of a text."""
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_ROWS = 1024
_WANTED = {"id", "_id", "title", "text", "contents", "context", "question", "paragraphs"}
"""Columns that some format reads."""
_CHUNK = 1 << 20
_MAX_RECORD = 1 << 26
"""Characters of one record of a JSON array beyond which it is taken for damaged."""
_BLANK = " \t\r\n"
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Document(NamedTuple):
    """id "" means: named after its content, and of equal ones only the first counts.

    fields  what the record says beside that (`url`, `source`, ..): see `fields_of`
    """

    id: str
    title: str
    text: str
    fields: Mapping[str, Any] = _NO_FIELDS

    @property
    def contents(self) -> str:
        """`"Title"`, newline, text: what the corpus holds. Without a title only the text."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text


@dataclass(frozen=True)
class CorpusFormat:
    """One shape of records.

    fits       whether a record has this shape: decides if no format is given
    documents  the documents of one record; raises KeyError, TypeError or ValueError for a record of another shape
    """

    help: str
    fits: Callable[[Record], bool]
    documents: Callable[[Record], Iterator[Document]]


class RecordReader:
    """The records of one file. `fraction` tells how much of it has been read."""

    def __init__(self, path: Path) -> None:
        self.path, self.fraction = path, 0.0

    def __iter__(self) -> Generator[Where, None, None]:
        """UserError for a file that cannot be read, and for a record that is no JSON object, with its number."""
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
                if magic == b"PAR1":
                    yield from parquet_records(self.path, self._set_fraction)
                    return
                file.seek(0)
                size = max(self.path.stat().st_size, 1)
                binary = cast(IO[bytes], gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file)
                yield from self._text_records(binary, lambda: self._set_fraction(file.tell() / size))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8 text", why=str(error), todo="convert it to UTF-8") from None
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            raise UserError(
                f"cannot read the corpus {self.path}",
                why=getattr(error, "strerror", None) or str(error),
                todo="give --corpus a file of passages (JSON lines, JSON, parquet, TSV; gzip or not)",
            ) from None

    def _set_fraction(self, fraction: float) -> None:
        self.fraction = fraction

    def _text_records(self, binary: IO[bytes], tick: Callable[[], None]) -> Iterator[Where]:
        if ".tsv" in self.path.suffixes[-2:]:
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as table:
                yield from self._tsv(table, tick)
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
            raise self._bad(f"line {number}", str(error)) from None
        return self._mapping(value, f"line {number}")

    def _mapping(self, value: Any, where: str) -> Record:
        if not isinstance(value, dict):
            raise self._bad(where, f"a {type(value).__name__} where an object is needed")
        return value

    def _bad(self, where: str, why: str) -> UserError:
        return UserError(f"{where} of {self.path} is not a passage", why=why, todo="correct or remove it")

    def _array(self, head: str, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        decoder, number = json.JSONDecoder(), 1
        buffer, at = head, head.index("[") + 1
        while True:
            at = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
            if buffer.startswith("]", at):
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
            except RecursionError as error:
                raise self._bad(f"record {number}", str(error)) from None
            except ValueError as error:
                piece = text.read(_CHUNK)
                if not piece or len(buffer) - at > _MAX_RECORD:
                    raise self._bad(f"record {number}", str(error)) from None
                # only here: to cut off each record would copy all that follows it
                buffer, at = buffer[at:] + piece, 0
                tick()
                continue
            yield number, self._mapping(value, f"record {number}")
            number, at = number + 1, end

    def _tsv(self, text: IO[str], tick: Callable[[], None]) -> Iterator[Where]:
        for number, row in enumerate(csv.DictReader(text, delimiter="\t"), start=2):
            if number % 1024 == 0:
                tick()
            if None in row:
                raise self._bad(f"line {number}", "it has more fields than the header")
            yield number, row


def parquet_records(path: Path, progress: Callable[[float], None]) -> Iterator[tuple[int, Record]]:
    """Yield (number from 1, record) of every row. Holds one batch of rows; OSError for a file that is damaged."""
    import pyarrow as pa  # 50 MB of memory, which the service does without
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            # of the others only what a passage can carry: dumps often hold vectors
            columns = [
                field.name for field in file.schema_arrow if field.name in _WANTED or _is_scalar_column(field.type)
            ]
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns or None):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
                progress(number / total)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns of a file; OSError for one that is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def content_id(document: Document) -> str:
    """Return 16 hexadecimal digits that depend on title and text only, so that a passage has one name in every file."""
    content = f"{document.title}\n{document.text}".encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=8, person=b"foray passage").hexdigest()


def text_of(value: Any, name: str) -> str:
    """Return `value` if it is text; TypeError that names the field otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is a {type(value).__name__} and not text")
    return value


def fields_of(record: Record, without: Collection[str]) -> dict[str, Any]:
    """Return the record's texts, numbers, truth values and nulls, as clients of other servers read them.

    Left out are lists, objects (a vector!), texts beyond MAX_FIELD_CHARS, and what cannot be sent as JSON.
    """
    found: dict[str, Any] = {}
    for name, value in record.items():
        if name in without or len(name) > MAX_NAME_CHARS or len(found) == MAX_FIELDS:
            continue
        if _is_scalar_value(value):
            found[cleaned(name)] = cleaned(value) if isinstance(value, str) else value
    return found


def _is_scalar_value(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case str():
            return len(value) <= MAX_FIELD_CHARS
        case int() | float():
            return abs(value) < 2**63  # neither NaN nor infinite, which JSON has no word for
        case _:
            return False


def cleaned(text: str) -> str:
    """Return the text with `?` for lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def id_of(record: Record) -> str:
    """Return the record's id as text, "" when it has none."""
    value = record.get("id", record.get("_id", ""))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"`id` is a {type(value).__name__} and not a string or an integer")
    return str(value)


def _is_scalar_column(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)
