"""Question files of the usual shapes, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.data.questions import load_questions
from protocol.errors import UserError

SHAPES = [
    {"id": "a", "question": "who ?", "golden_answers": ["Ada", "A. L."]},
    {"id": "a", "question": "who ?", "answers": ["Ada", "A. L."], "supporting_ids": ["4", "6"], "hops": 2},
    {"question": "who ?", "answer": ["Ada", "A. L."]},
]


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("record", SHAPES, ids=["flashrag", "foray", "nq_open"])
def test_every_known_shape_is_read(tmp_path: Path, record: dict[str, Any]) -> None:
    (question,) = load_questions(write(tmp_path / "q.jsonl", record)).questions
    assert (question.text, question.answers) == ("who ?", ("Ada", "A. L."))
    assert question.id == record.get("id", "line-1")
    found = {"hops": 2, "supporting_ids": "4,6"} if "hops" in record else {}
    assert question.meta == {"source": "q"} | found


def test_hotpotqa_has_one_answer_and_its_own_id_field(tmp_path: Path) -> None:
    record = {
        "_id": "5a8",
        "question": "who ?",
        "answer": "Badr Hari",
        "type": "bridge",
        "supporting_facts": [["x", 1]],
    }
    meta = {"type": "bridge", "source": "hotpotqa", "supporting_ids": "x"}
    (question,) = load_questions(write(tmp_path / "q.jsonl", record)).questions
    assert (question.id, question.answers, question.meta) == ("5a8", ("Badr Hari",), meta)


def test_the_fingerprint_depends_on_the_questions_not_on_the_file_format(tmp_path: Path) -> None:
    one = load_questions(write(tmp_path / "a", SHAPES[0], "", SHAPES[1]))
    same = load_questions(write(tmp_path / "b", SHAPES[1], SHAPES[0]))
    other = load_questions(write(tmp_path / "c", SHAPES[0], SHAPES[1] | {"answers": ["Bob"]}))
    assert len(one) == 2
    assert one.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object, found a list"),
        ({"answers": ["x"]}, "no `question`"),
        ({"question": " ", "answers": ["x"]}, "no `question`"),
        ({"question": "who ?"}, "no answer"),
        ({"question": "who ?", "answers": []}, "`answers` is not"),
        ({"question": "who ?", "answers": [1]}, "`answers` is not"),
        ({"question": "who ?", "answers": ["x"], "id": "i" * 300}, "at most 256"),
        ({"question": "who ?", "answers": ["x" * 600_000] * 2}, "exceed a task's limit of 1044480"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(UserError) as caught:
        load_questions(write(tmp_path / "q.jsonl", SHAPES[0], line))
    assert "line 2 of " in caught.value.what and "q.jsonl" in caught.value.what and why in caught.value.why


def test_missing_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is empty"):
        load_questions(write(tmp_path / "q.jsonl", ""))
    (tmp_path / "b").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="not UTF-8"):
        load_questions(tmp_path / "b")
