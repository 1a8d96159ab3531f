"""Read files as records, and records as documents.

Files are JSON lines, one JSON array, either of them in gzip, parquet (row group by row group), or TSV with a header.
The first bytes of a file determine which; TSV is recognised by its name.
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
"""Number of the record (or line), from 1, and the record."""
MAX_FIELDS, MAX_NAME_CHARS, MAX_FIELD_CHARS = 32, 64, 4096
"""Limits on further fields of a passage: their number, and characters of a name and of a text."""
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_ROWS = 1024
_WANTED = {"id", "_id", "title", "text", "contents", "context", "question", "paragraphs"}
"""Columns that some format reads."""
_CHUNK = 1 << 20
_MAX_RECORD = 1 << 26
"""Characters of one record of a JSON array beyond which it counts as damaged."""
_BLANK = " \t\r\n"
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Document(NamedTuple):
    """A document. id "": derived from the content; of equal documents only the first is kept.

    fields  further fields of the record (`url`, `source`, ..): see `fields_of`
    """

    id: str
    title: str
    text: str
    fields: Mapping[str, Any] = _NO_FIELDS

    @property
    def contents(self) -> str:
        """Return the corpus form: `"Title"`, newline, text; without a title only the text."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text


@dataclass(frozen=True)
class CorpusFormat:
    """One record format.

    fits       whether a record has this format; used for detection
    documents  the documents of one record; raises KeyError, TypeError or ValueError for another format
    """

    help: str
    fits: Callable[[Record], bool]
    documents: Callable[[Record], Iterator[Document]]


class RecordReader:
    """The records of one file. `fraction` is the share that has been read."""

    def __init__(self, path: Path) -> None:
        self.path, self.fraction = path, 0.0

    def __iter__(self) -> Generator[Where, None, None]:
        """Raises UserError for an unreadable file, or with the number of a record that is not a JSON object."""
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
                todo="set --corpus to a file of passages (JSON lines, JSON, parquet, TSV; gzip or not)",
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
            raise self._bad(where, f"expected an object, found a {type(value).__name__}")
        return value

    def _bad(self, where: str, why: str) -> UserError:
        return UserError(f"{where} of {self.path} is not a valid passage", why=why, todo="correct or remove it")

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
                # only here: cutting off each record would copy the rest of the buffer
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
    """Yield (number from 1, record) of every row. Keeps one batch of rows in memory. Raises OSError for a damaged
    file."""
    import pyarrow as pa  # 50 MB of memory that the service does not need
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            # of the others only scalar fields: dumps often contain vectors
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
    """Return the names of the columns of a file; raises OSError for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from None


def content_id(document: Document) -> str:
    """Return 16 hexadecimal digits of title and text, so that a passage has the same id in every file."""
    content = f"{document.title}\n{document.text}".encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=8, person=b"foray passage").hexdigest()


def text_of(value: Any, name: str) -> str:
    """Return `value` if it is text; otherwise raise TypeError with the field's name."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is a {type(value).__name__}, not text")
    return value


def fields_of(record: Record, without: Collection[str]) -> dict[str, Any]:
    """Return the record's strings, numbers, booleans and nulls, as clients of other servers expect.

    Lists, objects (e.g. vectors), texts beyond MAX_FIELD_CHARS and values that JSON cannot represent are dropped.
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
            return abs(value) < 2**63  # excludes NaN and infinity, which JSON cannot represent
        case _:
            return False


def cleaned(text: str) -> str:
    """Return the text with `?` for lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def id_of(record: Record) -> str:
    """Return the record's id as text, "" if it has none."""
    value = record.get("id", record.get("_id", ""))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"`id` is a {type(value).__name__}, not a string or an integer")
    return str(value)


def _is_scalar_column(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)
