"""Documents, and how a record of a file becomes documents. `protocol.runtime.records` reads the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from protocol.runtime.records import Record, RecordKind

MAX_FIELDS, MAX_NAME_CHARS, MAX_FIELD_CHARS = 32, 64, 4096
"""Limits on further fields of a passage: their number, and characters of a name and of a text."""
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
PASSAGES = RecordKind(
    "passage", "corpus", "set --corpus to a file of passages (JSON lines, JSON, parquet, TSV; gzip or not)"
)
COLUMNS = frozenset({"id", "_id", "title", "text", "contents", "context", "question", "paragraphs"})
"""Columns that some format reads, besides those of scalars."""


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
