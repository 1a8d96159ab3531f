"""What a record of a question file becomes, and how its fields are read. Pure."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Scalar
from protocol.runtime.records import Record

ANSWER_FIELDS = ("answers", "golden_answers", "answer", "possible_answers")
SOURCE_FIELDS = ("source", "data_source", "dataset")
META_FIELDS = ("hops", "type", "level", "split")
"""Scalar fields of a record that are kept as metadata."""


@dataclass(frozen=True)
class Asked:
    """One question as a record holds it.

    id          "" if the record has none: its place in the file is then used
    golds       gold answers, at least one, none blank
    source      data set that it comes from; "" if the record does not say
    meta        further scalars
    supporting  ids or titles of the passages that support the answer
    """

    id: str
    text: str
    golds: tuple[str, ...]
    source: str = ""
    meta: Mapping[str, Scalar] = field(default_factory=dict)
    supporting: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionFormat:
    """One record format of questions.

    help    its fields, and who writes it; ends in "(schema only)" if no original file was read in tests
    fits    whether a record has this format; used for detection
    read    the question of a record, None for one that cannot be trained or scored; raises ValueError with the reason
            for a record of another format
    source  data set of its records, unless they name one; "" if files of this format hold any data set
    """

    help: str
    fits: Callable[[Record], bool]
    read: Callable[[Record], Asked | None]
    source: str = ""


def text_of(record: Record, name: str = "question") -> str:
    """Return the text of a field. Raises ValueError if it is missing or blank."""
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"no `{name}`")
    return value


def golds_of(value: Any, name: str) -> tuple[str, ...]:
    """Return gold answers without blank ones. Raises ValueError if none is left, or for other types."""
    if isinstance(value, str):
        cell = listed(value)
        value = [value] if cell is None else cell
    if not isinstance(value, list | tuple) or not all(isinstance(gold, str) for gold in value):
        raise ValueError(f"`{name}` is not a string or a list of strings")
    found = tuple(gold for gold in value if gold.strip())
    if not found:
        raise ValueError(f"`{name}` is empty")
    return found


def listed(text: str) -> list[str] | None:
    """Return the strings of a list that a cell of a table holds, in JSON or in Python's notation; None for other text.

    Raises ValueError for a list without commas, as numpy prints it: Python would join its strings.
    """
    if not text.lstrip().startswith("["):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return None
        tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
        if read is ast.literal_eval and sum(token.type == tokenize.STRING for token in tokens) != len(value):
            raise ValueError("a list has no commas between its strings")
        return value
    return None


def id_of(record: Record, *names: str) -> str:
    """Return the first of the fields `names` that is present, as text; "" if there is none."""
    for name in names or ("id", "_id", "qid", "idx"):
        if (value := record.get(name)) is not None:
            return str(value)
    return ""


def source_of(record: Record) -> str:
    """Return the data set that the record names, "" if none."""
    return next((str(value) for name in SOURCE_FIELDS if (value := record.get(name))), "")


def meta_of(record: Record, names: Iterable[str] = META_FIELDS) -> dict[str, Scalar]:
    """Return the scalar fields among `names`."""
    return {name: value for name in names if isinstance(value := record.get(name), str | int | float | bool)}
