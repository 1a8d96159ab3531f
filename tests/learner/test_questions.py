"""Question files of the usual shapes, and what is said of those that are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner.config.questions import QuestionSource
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
    assert question.id == record.get("id", "q-line-1")
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


def test_an_id_of_zero_is_an_id(tmp_path: Path) -> None:
    lines = [{"id": number, "question": "who ?", "answers": ["Ada"]} for number in (5, 0)]
    found = load_questions(write(tmp_path / "q.jsonl", *lines))
    assert [question.id for question in found.questions] == ["5", "0"]


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
        ({"question": "who ?", "answers": []}, "`answers` is empty"),
        ({"question": "who ?", "answers": [1]}, "`answers` is not"),
        ({"question": "who ?", "answers": ["x"], "id": "i" * 300}, "length <= 256"),
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


QUESTION = {"id": "0", "question": "who ?", "answers": ["Ada"]}


def arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def test_parquet_gzip_and_a_table_are_read(tmp_path: Path) -> None:
    row = {"data_source": "nq", "prompt": [{"role": "user", "content": "Question: who ?"}], "extra_info": {"index": 3}}
    row |= {"reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "A. L."]}}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (question,) = load_questions(tmp_path / "train.parquet").questions
    assert (question.id, question.text, question.answers) == ("nq/3", "who ?", ("Ada", "A. L."))
    (tmp_path / "q.json.gz").write_bytes(gzip.compress(json.dumps([QUESTION]).encode()))
    assert load_questions(tmp_path / "q.json.gz").questions[0].text == "who ?"
    (tmp_path / "nq-test.qa.csv").write_text("who ?\t['Ada', \"A. 'L.'\"]\n")
    (question,) = load_questions(tmp_path / "nq-test.qa.csv").questions
    assert (question.id, question.answers) == ("nq-test-line-1", ("Ada", "A. 'L.'"))


def test_folders_of_datasets_and_of_shards_are_read(tmp_path: Path) -> None:
    rows = [QUESTION | {"id": str(n)} for n in range(4)]
    saved = tmp_path / "nq"
    arrow(saved / "train" / "data-00000-of-00002.arrow", rows[:3])
    arrow(saved / "train" / "data-00001-of-00002.arrow", rows[3:])
    (saved / "train" / "state.json").write_text("{}")
    (saved / "train" / "dataset_info.json").write_text("{}")
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    found = load_questions(saved / "train").questions
    assert [q.id for q in found] == ["0", "1", "2", "3"] and {q.source for q in found} == {"nq"}
    with pytest.raises(UserError, match="several splits: train") as caught:
        load_questions(saved)
    assert caught.value.todo.endswith("nq/train")

    shards = tmp_path / "hub" / "data"
    shards.mkdir(parents=True)
    for name, part in (("train-00000-of-00001", rows[:3]), ("test-00000-of-00001", rows[3:])):
        pq.write_table(pa.Table.from_pylist(part), shards / f"{name}.parquet")
    assert len(load_questions(shards / "train")) == 3
    with pytest.raises(UserError, match="several splits: train, test") as caught:
        load_questions(shards)
    assert caught.value.todo.endswith("data/train")

    plain = tmp_path / "triviaqa"  # FlashRAG's layout: a test set must not be trained on because a folder was named
    plain.mkdir()
    write(plain / "train.jsonl", *rows[:3])
    write(plain / "test.jsonl", rows[3])
    with pytest.raises(UserError, match="several splits: train, test"):
        load_questions(plain)
    assert len(load_questions(plain / "train")) == 3


def test_questions_without_an_answer_in_the_corpus_are_left_out(tmp_path: Path) -> None:
    record = {"id": "a", "question": "who ?", "answer": "Ada", "answer_aliases": [], "answerable": True}
    path = write(tmp_path / "m.jsonl", record, record | {"id": "b", "answerable": False})
    assert [q.id for q in load_questions(path).questions] == ["a"]


def test_several_sources_keep_their_names_and_get_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "nq").mkdir()
    nq = write(tmp_path / "nq" / "train.jsonl", QUESTION, QUESTION | {"id": "1"})
    hotpot = write(tmp_path / "h.jsonl", QUESTION)
    found = load_questions([QuestionSource(path=nq), QuestionSource(path=hotpot, source="hotpotqa")])
    assert [(q.id, q.source) for q in found.questions] == [
        ("nq/0", "nq"),
        ("nq/1", "nq"),
        ("hotpotqa/0", "hotpotqa"),
    ]
    assert found.shares == ()
    weighted = load_questions([QuestionSource(path=nq, weight=1), QuestionSource(path=hotpot, weight=3)])
    assert weighted.shares == ((2, 1.0), (1, 3.0))
    with pytest.raises(UserError, match=r"some sources of learner\.questions have a weight"):
        load_questions([QuestionSource(path=nq, weight=1), hotpot])
    with pytest.raises(UserError, match=r"none\.jsonl"):
        load_questions([nq, tmp_path / "none.jsonl"])


def test_a_missing_answer_in_parquet_names_its_row(tmp_path: Path) -> None:
    rows = [{"question": "who ?", "answers": ["Ada"]}, {"question": "who ?", "answers": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    with pytest.raises(UserError, match=r"row 2 of the questions file .*q\.parquet"):
        load_questions(tmp_path / "q.parquet")
