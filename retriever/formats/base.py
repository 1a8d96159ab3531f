"""What a format promises: from one record of a file to the documents in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Document(NamedTuple):
    """id "" means: named after its content, and of equal ones only the first counts."""

    id: str
    title: str
    text: str

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


def id_of(record: Record) -> str:
    """The record's id as text, "" when it has none."""
    value = record.get("id", record.get("_id", ""))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"`id` is a {type(value).__name__} and not a string or an integer")
    return str(value)
