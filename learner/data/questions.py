"""Read questions: files of the formats in `learner.data.formats`, alone or several with weights. Imports no framework.

load_questions("train.jsonl").questions           # Question(id, text, answers, meta), with `.source`
load_questions([nq, hotpotqa])                    # several QuestionSource
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec

from learner.config.questions import QuestionSource, question_sources
from learner.data.formats import FORMATS, detect
from learner.data.formats.base import ANSWER_FIELDS, Asked, QuestionFormat
from protocol.codec import LIMITS, write_body
from protocol.errors import UserError
from protocol.messages import Question, supporting_meta
from protocol.runtime.records import SPLITS, Record, RecordKind, RecordReader, RowCount, record_files

MAX_QUESTION_BYTES = LIMITS["task"] - 4096
"""The rest is reserved for the other fields of a task."""
MAX_ID = 256
"""Characters of a question's id."""
EXAMPLE = '{"id": "q1", "question": "who ..?", "answers": ["..."]}'
QUESTIONS = RecordKind(
    "question", "questions file", f"give a file of a format in docs/data.md, e.g. lines of {EXAMPLE}"
)
_UNTELLING = SPLITS | {"questions", "data"}
"""File names that say nothing about the data set: the folder is then its name."""
_ASKS, _ANSWERS = (re.compile(p, re.I) for p in ("quest|query|problem|prompt|input", "answ|gold|target|label|solution"))
"""Columns that may hold questions and answers in a file of an unknown format, for advice."""
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class QuestionSet:
    """Questions in file order, never empty.

    fingerprint  sha256 hex over id, text and answers of all questions
    shares       (number of questions, weight) of each source, in order; empty: all questions are equally frequent
    """

    questions: tuple[Question, ...]
    fingerprint: str
    shares: tuple[tuple[int, float], ...] = ()

    def __len__(self) -> int:
        return len(self.questions)


def load_questions(
    questions: Path | str | Sequence[QuestionSource | Path | str], rows: RowCount | None = None
) -> QuestionSet:
    """Read the questions of one file or of several sources.

    Each question has its data set in `meta["source"]`. With several sources, ids begin with the source.
    `rows` counts the rows. Raises UserError that names the file and the line (or row) of an invalid question, unless
    `rows.skip_invalid`.
    """
    rows = rows or RowCount()
    sources = question_sources(questions)
    weights = [source.weight for source in sources]
    if None in weights and any(weights):
        raise UserError(
            "some sources of learner.questions have a weight and some have none",
            why="the number of questions of one cannot be compared with the weight of another",
            todo="set `weight` for every source, or for none of them",
        )
    found: list[Question] = []
    shares = []
    for source in sources:
        before = len(found)
        of_source = read_questions(source, rows=rows)
        found += _prefixed(of_source) if len(sources) > 1 else of_source
        if len(found) == before:
            raise empty(source.path, rows)
        shares.append((len(found) - before, source.weight or 0.0))
    whole = tuple(found)
    return QuestionSet(whole, fingerprint(whole), tuple(shares) if weights[0] and len(sources) > 1 else ())


def check_questions(source: QuestionSource, rows: int, counts: RowCount | None = None) -> tuple[int, str]:
    """Read the first `rows` questions of a source of any size. Return (their number, the name of the format).

    Raises the errors of `load_questions` for these rows.
    """
    with closing(read_questions(source, rows=counts)) as questions:
        found = sum(1 for _ in islice(questions, rows))
    if not found:
        raise empty(source.path, RowCount())
    return found, format_of(source)


def format_of(source: QuestionSource) -> str:
    """Return the name of the format of a source. Raises UserError for an unknown one."""
    first = next(_records(source, RowCount(skip_invalid=True)), None)
    return source.format or (_detected(first[2], source) if first else "foray")


def read_questions(
    source: QuestionSource, form: QuestionFormat | None = None, rows: RowCount | None = None
) -> Generator[Question, None, None]:
    """Yield the questions of one source; `form` replaces the format. Raises the errors of `load_questions`."""
    rows = rows or RowCount()
    for reader, number, record in _records(source, rows):
        if form is None:
            form = FORMATS[_known(source) or _detected(record, source)]
        try:
            asked = form.read(record)
            if asked is None:
                rows.drop("without an answer in the corpus", f"{reader.unit} {number} of {reader.path}")
                continue
            name = source.source or asked.source or form.source or _named_after(source.path)
            # the number alone repeats in each shard, and in the files that a merge reads
            made_up = f"{_stem(reader.path, rows)}-{reader.unit}-{number}"
            yield _question(replace(asked, id=asked.id or made_up, source=_UNNAMEABLE.sub("-", name)[:64]))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            rows.refuse(_bad(reader, number, f"no {error}" if isinstance(error, KeyError) else str(error)))


def _stem(path: Path, rows: RowCount) -> str:
    """Return the name of a file without its suffixes, with a number if another file of this reading has it."""
    stem = _UNNAMEABLE.sub("-", path.name.partition(".")[0])[:200]
    same = sum(known.partition(".")[0] == stem for known in rows.stems.values())
    return rows.stems.setdefault(path, f"{stem}.{same + 1}" if same else stem)


def fingerprint(questions: tuple[Question, ...]) -> str:
    """Return the sha256 (hex) of the numbered questions, on which the sampler's order depends."""
    digest = hashlib.sha256()
    for question in questions:
        record = [question.id, question.text, list(question.answers)]
        digest.update(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _records(source: QuestionSource, rows: RowCount) -> Iterator[tuple[RecordReader, int, Record]]:
    for path in record_files(source.path, QUESTIONS, one_split=True):
        reader = RecordReader(path, QUESTIONS, rows=rows)
        for number, record in reader:
            yield reader, number, record


def _known(source: QuestionSource) -> str:
    if source.format and source.format not in FORMATS:
        raise UserError(f"unknown format of questions {source.format!r}", todo="use one of: " + ", ".join(FORMATS))
    return source.format


def _detected(record: Record, source: QuestionSource) -> str:
    if name := detect(record):
        return name
    # a record with a question and no answer, or the reverse, is a mistake in a file of the common format
    if "question" in record or any(name in record for name in ANSWER_FIELDS):
        return "foray"
    raise UserError(
        f"unknown format of questions: {source.path}",
        why=f"its first record has {', '.join(sorted(map(str, record)))}",
        todo=f"{_convert(record, source.path)}, or use one of the formats of `foray data formats`",
    )


def _convert(record: Record, path: Path) -> str:
    """Return the command that converts records like this one, with its most likely columns."""
    out, names = f"{path.name.partition('.')[0] or 'questions'}-converted.jsonl", list(map(str, record))
    question, answers = (min(filter(found.search, names), key=len, default="COLUMN") for found in (_ASKS, _ANSWERS))
    return shlex.join(["foray", "data", "convert", str(path), out, "--question", question, "--answers", answers])


def _question(asked: Asked) -> Question:
    """Return the question. Raises ValueError with the reason if it cannot be one."""
    meta = dict(asked.meta) | {"source": asked.source}
    if asked.supporting:
        meta["supporting_ids"] = supporting_meta(asked.supporting)
    try:
        question = Question(id=asked.id, text=asked.text, answers=asked.golds, meta=meta)
        size = len(write_body(question))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (ValueError, OverflowError) as error:  # a number beyond 64 bits, half a surrogate pair
        raise ValueError(f"it cannot be encoded: {str(error)[:200]}") from None
    if size > MAX_QUESTION_BYTES:
        raise ValueError(f"its {size} bytes exceed a task's limit of {MAX_QUESTION_BYTES}")
    return question


def _prefixed(questions: Iterator[Question]) -> Iterator[Question]:
    """Yield the questions with ids that begin with the source: data sets number their questions alike."""
    for question in questions:
        prefix = f"{question.source}/"
        named = question.id if question.id.startswith(prefix) else f"{prefix}{question.id}"
        if len(named) > MAX_ID:  # ids may begin alike
            named = f"{named[: MAX_ID - 17]}-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        yield question.model_copy(update={"id": named})


def _named_after(path: Path) -> str:
    """Return the name of a data set from its file: "nq" for nq/train.jsonl and for nq.jsonl.gz."""
    stem = path.name.partition(".")[0]
    return path.absolute().parent.name if stem.lower() in _UNTELLING else stem


def empty(path: Path, rows: RowCount) -> UserError:
    """Return the error for a source without a valid question."""
    what = "has no valid question" if rows.dropped else "is empty"
    why = rows.account(rows.valid, "") if rows.dropped else ""
    return UserError(f"the questions file {path} {what}", why=why, todo="use a file with at least one question")


def _bad(reader: RecordReader, number: int, why: str) -> UserError:
    return UserError(
        f"{reader.unit} {number} of the questions file {reader.path} is invalid",
        why=why,
        todo=f"correct it, or drop such rows: foray data convert --skip-invalid; the formats are in docs/data.md, e.g. "
        f"{EXAMPLE}",
    )
