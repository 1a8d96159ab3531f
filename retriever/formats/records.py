"""Records out of files, one at a time: JSON lines, one JSON array, either of them in gzip, parquet, TSV with a header.

What a file holds is told by its first bytes, not by its name (TSV has nothing to be told by but its name).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, cast

from protocol.errors import UserError
from retriever.formats.base import Record

_CHUNK = 1 << 20
_MAX_RECORD = 1 << 26
"""Characters of one record of a JSON array beyond which it is taken for damaged."""
_BLANK = " \t\r\n"
_BETWEEN = re.compile(r"[ \t\r\n,]*")

Where = tuple[int, Record]
"""Number of the record (of the line, where records are lines), from 1; and the record."""


class Records:
    """The records of one file. `fraction` tells how much of it has been read."""

    def __init__(self, path: Path) -> None:
        self.path, self.fraction = path, 0.0

    def __iter__(self) -> Generator[Where, None, None]:
        """UserError for a file that cannot be read, and for a record that is no JSON object, with its number."""
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
                if magic == b"PAR1":
                    from retriever.formats.parquet import parquet_records

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
        return UserError(f"{where} of {self.path} is not a passage", why=why, todo="mend or remove it")

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
