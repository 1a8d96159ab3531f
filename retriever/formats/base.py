"""What a format promises: from one record of a file to the documents in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

Record = Mapping[str, Any]
MAX_FIELDS, MAX_NAME_CHARS, MAX_FIELD_CHARS = 32, 64, 4096
"""Bounds on what a passage carries beside its id and contents: fields, and characters of a name and of a text."""
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


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
class Format:
    """One shape of records.

    fits       whether a record has this shape: it decides when nobody says which format it is
    documents  the documents of one record; raises KeyError, TypeError or ValueError for a record of another shape
    """

    help: str
    fits: Callable[[Record], bool]
    documents: Callable[[Record], Iterator[Document]]


def content_id(document: Document) -> str:
    """16 hexadecimal digits that depend on title and text only, so that a passage has one name in every file."""
    content = f"{document.title}\n{document.text}".encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=8, person=b"foray passage").hexdigest()


def text_of(value: Any, name: str) -> str:
    """`value` if it is text; TypeError that names the field otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is a {type(value).__name__} and not text")
    return value


def fields_of(record: Record, without: Collection[str]) -> dict[str, Any]:
    """The record's text, numbers, truth values and nulls, as clients of other servers read them. Lists, objects (a
    vector!) and texts beyond MAX_FIELD_CHARS are left out, and so is what cannot be sent as JSON."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if name in without or len(name) > MAX_NAME_CHARS or len(found) == MAX_FIELDS:
            continue
        if _is_scalar(value):
            found[cleaned(name)] = cleaned(value) if isinstance(value, str) else value
    return found


def _is_scalar(value: Any) -> bool:
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
    """Text with `?` for lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def id_of(record: Record) -> str:
    """The record's id as text, "" when it has none."""
    value = record.get("id", record.get("_id", ""))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"`id` is a {type(value).__name__} and not a string or an integer")
    return str(value)
