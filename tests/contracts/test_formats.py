"""Every format of the table reads records as its source writes them, and refuses the others by a documented error.

A format is one file and one line in a registry: `learner.data.formats.FORMATS` for questions,
`retriever.corpus.formats.FORMATS` for passages. A new one needs a sample here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from learner.config.questions import QuestionSource
from learner.data import formats as questions
from learner.data.formats.base import Asked
from learner.data.questions import check_questions, load_questions
from protocol.errors import UserError
from retriever.corpus import formats as corpora
from retriever.indexing.input import documents, read_input
from tests.support.format_samples import CORPORA, QUESTIONS, WHO

SAMPLES = [(name, record, asked) for name, rows in QUESTIONS.items() for record, asked in rows]


def test_every_format_has_a_sample() -> None:
    assert QUESTIONS.keys() == questions.FORMATS.keys()
    assert CORPORA.keys() == corpora.FORMATS.keys()


@pytest.mark.parametrize(("name", "record", "asked"), SAMPLES)
def test_a_sample_is_detected_and_read(name: str, record: dict[str, Any], asked: Asked) -> None:
    assert questions.detect(record) == name
    assert questions.FORMATS[name].read(record) == asked


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize(
    "wrong", [{}, {"question": WHO}, {"question": 3, "answers": ["x"]}, {"question": WHO, "answer": 4}]
)
def test_other_records_are_refused_with_a_reason(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        questions.FORMATS[name].read(wrong)


@pytest.mark.parametrize(("name", "record", "asked"), SAMPLES)
def test_a_file_of_samples_becomes_questions(name: str, record: dict[str, Any], asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps([record, record]))
    found = load_questions(path).questions
    assert check_questions(QuestionSource(path=path), 5) == (2, name)
    assert {q.id for q in found} == ({asked.id} if asked.id else {"some-record-1", "some-record-2"})
    assert all((q.text, q.answers, q.supporting) == (asked.text, asked.golds, asked.supporting) for q in found)
    assert {q.source for q in found} == {asked.source or questions.FORMATS[name].source or "some"}


@pytest.mark.parametrize("name", CORPORA)
def test_a_sample_of_passages_is_detected_and_read(name: str, tmp_path: Path) -> None:
    record, contents = CORPORA[name]
    path = tmp_path / "c.json"
    path.write_text(json.dumps([record]))
    given = read_input(path)
    assert given.format == name
    assert [document.contents for document in documents(given, lambda share, count: None)] == contents
    path.write_text(json.dumps([record, {"id": "1"}]))
    with pytest.raises(UserError, match=r"record 2 of .* does not match the format"):
        list(documents(read_input(path), lambda share, count: None))


@pytest.mark.data
def test_the_published_files_are_read() -> None:
    directory = Path(os.environ.get("FORAY_DATA", "")) / "formats"
    if not directory.is_dir():
        pytest.skip("FORAY_DATA does not name a directory with formats/")
    expected = {
        "2wiki_500_simpledeepsearcher.json": ("simpledeepsearcher", 500, "2wiki"),
        "NQ-open.efficientqa.dev.1.1.jsonl": ("nq_open", 1800, "NQ-open"),
        "bamboogle_flashrag.jsonl": ("flashrag", 125, "bamboogle_flashrag"),
        "flashrag_nq_test_sample.jsonl": ("flashrag", 17, "flashrag_nq_test_sample"),
        "hotpotqa_distractor_40.json": ("hotpotqa", 40, "hotpotqa"),
        "musique_10.json": ("musique", 10, "musique"),
        "strategyqa_dev.json": ("strategyqa", 229, "strategyqa"),
    }
    for name, (form, count, source) in expected.items():
        found = load_questions(directory / name).questions
        assert (len(found), {question.source for question in found}) == (count, {source})
        assert check_questions(QuestionSource(path=directory / name), 3) == (3, form)
    aliases = [q for q in load_questions(directory / "musique_10.json").questions if len(q.answers) > 1]
    assert len(aliases) == 4 and all(question.supporting for question in aliases)
    yes_no = {answer for q in load_questions(directory / "strategyqa_dev.json").questions for answer in q.answers}
    assert yes_no == {"yes", "no"}
