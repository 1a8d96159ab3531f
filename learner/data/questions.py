"""The training questions: reads JSON lines in the usual formats, returns `Question`s and a fingerprint.

Known formats: FlashRAG / Search-R1 {"id", "question", "golden_answers"}, NQ-open {"question", "answer": [..]}, HotpotQA
{"_id", "question", "answer": ".."}, and Foray's {"id", "question", "answers", "supporting_ids", "hops"}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.codec import LIMITS, pack
from protocol.errors import UserError
from protocol.messages import Question, Scalar

ANSWER_FIELDS = ("answers", "golden_answers", "answer")
META_FIELDS = ("dataset", "hops", "type", "level", "supporting_ids")
"""Fields of a record that are kept as metadata; a list becomes a comma-separated string."""
MAX_QUESTION_BYTES = LIMITS["task"] - 4096
"""The rest is reserved for the other fields of a task."""


EXAMPLE = '{"id": "q1", "question": "who ..?", "answers": ["..."]}'


@dataclass(frozen=True)
class QuestionSet:
    """Questions in file order, never empty. `fingerprint`: sha256 hex over id, text and answers of all questions."""

    questions: tuple[Question, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.questions)


def load_questions(path: Path) -> QuestionSet:
    """Read a JSON-lines file. Raises UserError that names the file and the invalid line."""
    questions = tuple(_read(path))
    if not questions:
        raise UserError(f"the questions file {path} is empty", todo="use a file with at least one question")
    return QuestionSet(questions, fingerprint(questions))


def check_questions(path: Path, rows: int) -> int:
    """Read the first `rows` questions of a file of any size, and return their number.

    Raises the errors of `load_questions` for these rows.
    """
    count = sum(1 for _ in islice(_read(path), rows))
    if not count:
        raise UserError(f"the questions file {path} is empty", todo="use a file with at least one question")
    return count


def _read(path: Path) -> Iterator[Question]:
    try:
        with path.open("rb") as file:
            _refuse_format(path, file.read(4096))
        # universal newlines are off: JSON may contain U+2028 and similar characters
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _question(line, number, path)
    except OSError as error:
        raise UserError(
            f"cannot read the questions file {path}",
            why=error.strerror or str(error),
            todo="set learner.questions to a file of JSON lines with `question` and `answers`",
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"the questions file {path} is not UTF-8 text",
            why=str(error),
            todo=f"convert them to JSON lines: {EXAMPLE}",
        ) from None


def _refuse_format(path: Path, head: bytes) -> None:
    """Raise UserError for files of another format, by their first bytes."""
    if head.startswith(b"PAR1"):
        name, todo = "a Parquet file", f"convert it to JSON lines: {EXAMPLE}"
    elif head.startswith(b"\x1f\x8b"):
        name, todo = "compressed with gzip", f"gunzip --keep {path}"
    elif head.lstrip().startswith(b"["):
        name, todo = "one JSON array", f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}, or write lines: {EXAMPLE}"
    else:
        return
    raise UserError(f"the questions file {path} is {name}", why="questions are read from JSON lines", todo=todo)


def fingerprint(questions: tuple[Question, ...]) -> str:
    """Return the sha256 (hex) of the numbered questions, on which the sampler's order depends."""
    digest = hashlib.sha256()
    for question in questions:
        record = [question.id, question.text, list(question.answers)]
        digest.update(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _question(line: str, number: int, path: Path) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(path, number, f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _bad(path, number, f"a {type(record).__name__}, not an object")
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise _bad(path, number, "no `question`")
    try:
        question = Question(
            id=str(record.get("id", record.get("_id", f"line-{number}"))),
            text=text,
            answers=_answers(record, path, number),
            meta=_meta(record),
        )
        size = len(pack(question.model_dump()))
        if size > MAX_QUESTION_BYTES:
            raise ValueError(f"{size} bytes exceed a task's limit of {MAX_QUESTION_BYTES}")
        return question
    except ValidationError as error:
        raise _bad(path, number, error.errors()[0]["msg"]) from None
    except (ValueError, OverflowError) as error:  # a number beyond 64 bits, half a surrogate pair
        raise _bad(path, number, f"it cannot be encoded: {str(error)[:200]}") from None


def _answers(record: dict[str, Any], path: Path, number: int) -> tuple[str, ...]:
    for name in ANSWER_FIELDS:
        if name not in record:
            continue
        value = record[name]
        answers = [value] if isinstance(value, str) else value
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
            raise _bad(path, number, f"`{name}` is not a string or a list of strings")
        return tuple(answers)
    raise _bad(path, number, f"no answer: none of the fields {', '.join(ANSWER_FIELDS)}")


def _meta(record: dict[str, Any]) -> dict[str, Scalar]:
    meta: dict[str, Scalar] = {}
    for name in META_FIELDS:
        value = record.get(name)
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        if isinstance(value, str | int | float | bool):
            meta[name] = value
    return meta


def _bad(path: Path, number: int, why: str) -> UserError:
    return UserError(
        f"line {number} of the questions file {path} is invalid",
        why=why,
        todo=f"write each line as {EXAMPLE}",
    )
