"""Convert, merge, split and sample files of questions; the table of formats."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from foray.data.dedupe import words_of
from learner.config.questions import QuestionSource
from learner.data.formats import FORMATS
from learner.data.formats.plain import columns as columns_format
from learner.data.questions import empty, load_questions, read_questions
from protocol.errors import UserError
from protocol.messages import Question
from protocol.runtime.files import atomic_write
from protocol.runtime.records import RowCount


class FormatRow(NamedTuple):
    """A row of the table of formats."""

    name: str
    of: str
    fields: str


def format_table() -> list[FormatRow]:
    """Return the formats of questions, then those of passages."""
    from retriever.corpus.formats import FORMATS as CORPORA

    questions = [FormatRow(name, "questions", form.help) for name, form in FORMATS.items()]
    return [*questions, *(FormatRow(name, "corpus", form.help) for name, form in CORPORA.items())]


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write Foray's JSON lines, which read back as the same questions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, _encoded(questions), durable=False)


def record_of(question: Question) -> dict[str, Any]:
    """Return a question as a record of Foray's JSON lines."""
    record: dict[str, Any] = {"id": question.id, "question": question.text, "answers": list(question.answers)}
    record |= {name: value for name, value in question.meta.items() if name != "supporting_ids"}
    return record | ({"supporting_ids": list(question.supporting)} if question.supporting else {})


def _encoded(questions: Iterable[Question]) -> Iterator[bytes]:
    for question in questions:
        yield json.dumps(record_of(question), ensure_ascii=False).encode() + b"\n"


def convert_questions(
    path: Path, out: Path, rows: RowCount, *, form: str = "", source: str = "", columns: tuple[str, ...] = ("", "", "")
) -> None:
    """Write the questions of any format as Foray's, one by one. `rows` counts them.

    columns  names of the columns of question, answers and id, for a format of your own
    """
    own = columns_format(*columns) if columns[0] else None

    def checked() -> Iterator[Question]:
        yield from read_questions(QuestionSource(path=path, source=source, format=form), own, rows)
        if not rows.valid:
            raise empty(path, rows)

    write_questions(out, checked())


def convert_corpus(path: Path, out: Path, rows: RowCount, form: str = "") -> None:
    """Write the passages of any format as corpus lines. `rows` counts them."""
    from retriever.indexing.input import as_line, documents, read_input

    given = read_input(path, form or None)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, map(as_line, documents(given, lambda share, passages: None, rows)), durable=False)


def merge(sources: Sequence[QuestionSource], rows: int | None, seed: int, count: RowCount) -> list[Question]:
    """Return the questions of several sources in random order, none twice.

    With weights, each source has its share of `rows`; by default as many as the smallest source, by its weight, allows.
    Raises UserError if a source is too small.
    """
    whole = load_questions(sources, count)
    generator = random.Random(seed)
    if not whole.shares:
        found = list(whole.questions)
        generator.shuffle(found)
        return found if rows is None else _first(found, rows)
    shares = [(size, Fraction(repr(weight))) for size, weight in whole.shares]
    total = sum((weight for _, weight in shares), Fraction())
    most = min(int(size * total / weight) for size, weight in shares)
    if rows is not None and rows > most:
        raise UserError(
            f"the files have too few questions for {rows} rows with these weights",
            why=f"at most {most} rows are possible without a repeat",
            todo="lower --rows, or train on the files themselves: learner.questions repeats small sources",
        )
    rows = most if rows is None else rows
    ends = [_nearest(rows * sum((w for _, w in shares[: n + 1]), Fraction()) / total) for n in range(len(shares))]
    out, start, begin = [], 0, 0
    for (size, _), end in zip(shares, ends, strict=True):
        out += generator.sample(whole.questions[start : start + size], end - begin)
        start, begin = start + size, end
    generator.shuffle(out)
    return out


def split(questions: Sequence[Question], parts: Sequence[str], seed: int) -> dict[str, list[Question]]:
    """Return part -> questions, in the order of the file. `parts`: NAME=SHARE, a number, or `rest`.

    Questions with the same words stay in one part. Raises UserError for parts that do not fit.
    """
    sizes = _sizes(parts, len(questions))
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(words_of(question.text), []).append(place)
    shuffled = list(groups.values())
    random.Random(seed).shuffle(shuffled)
    names = iter(sizes.items())
    name, left = next(names)
    chosen: dict[str, list[int]] = {each: [] for each in sizes}
    for group in shuffled:
        while left <= 0 and (following := next(names, None)) is not None:
            name, left = following
        if left <= 0:
            break
        chosen[name] += group
        left -= len(group)
    return {each: [questions[place] for place in sorted(places)] for each, places in chosen.items()}


def sample(questions: Sequence[Question], rows: int, seed: int) -> list[Question]:
    """Return `rows` random questions, in the order of the file. Raises UserError if there are fewer."""
    if rows > len(questions):
        raise UserError(f"{rows} questions were asked for, the file has {len(questions)}", todo="lower --rows")
    places = sorted(random.Random(seed).sample(range(len(questions)), rows))
    return [questions[place] for place in places]


def _first(questions: list[Question], rows: int) -> list[Question]:
    if rows > len(questions):
        raise UserError(f"{rows} questions were asked for, the files have {len(questions)}", todo="lower --rows")
    return questions[:rows]


def _nearest(number: Fraction) -> int:
    """Return the nearest integer, of two the lower: rounded to even, shares of 0.5, 1 and 0.5 rows would be 0, 2, 0."""
    return ceil(number - Fraction(1, 2))


def _sizes(parts: Sequence[str], total: int) -> dict[str, int]:
    """Return part -> number of questions."""
    sizes: dict[str, int] = {}
    rest, shares = "", Fraction()
    for part in parts:
        name, _, share = part.partition("=")
        try:
            if not name or name != Path(name).name or name in sizes or (share == "rest" and rest):
                raise ValueError
            if share == "rest":
                rest, sizes[name] = name, 0
                continue
            number = Fraction(repr(float(share)))
            if number <= 0 or (number >= 1 and number.denominator > 1):
                raise ValueError
            if number >= 1:
                sizes[name] = int(number)
                continue
            # each share rounded by itself could leave a row out, or one too many
            sizes[name] = _nearest((shares + number) * total) - _nearest(shares * total)
            shares += number
        except ValueError:
            todo = "give distinct names of files: train=0.9 dev=500 test=rest"
            raise UserError(f"{part!r} is not NAME=SHARE, NAME=NUMBER or NAME=rest", todo=todo) from None
    if rest:
        sizes[rest] = total - sum(sizes.values())
    if sum(sizes.values()) > total or min(sizes.values()) <= 0:
        raise UserError(
            f"the parts {', '.join(parts)} do not fit {total} questions",
            why=f"they would have {', '.join(f'{name} {size}' for name, size in sizes.items())}",
            todo="lower a share",
        )
    return sizes
