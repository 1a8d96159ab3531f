"""`foray data` on files of questions: what is written reads back, mixes have their shares, test sets stay apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foray.cli import main
from foray.data.dedupe import dedupe, words_of
from foray.data.files import write_questions
from learner.config.questions import QuestionSource
from learner.data.questions import load_questions, read_questions
from protocol.messages import Question
from tests.support.environments import write_tokenizer


def asked(name: str, text: str, *golds: str) -> Question:
    return Question(id=name, text=text, answers=golds or ("Ada",), meta={"source": "s"})


def write(path: Path, *questions: Question) -> Path:
    write_questions(path, questions)
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*argv: object) -> int:
    return main(["data", *map(str, argv)])


TITLES = st.lists(st.text("ab, c", min_size=1).map(str.strip).filter(bool), max_size=3, unique=True)


@given(st.text(min_size=1, max_size=20).filter(str.strip), st.sampled_from(["nq", "2wiki"]), TITLES)
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, source: str, titles: list[str]
) -> None:
    from protocol.messages import supporting_meta

    try:
        text.encode()
    except UnicodeEncodeError:
        return
    meta = {"source": source, "hops": 2, "type": "bridge", "split": "train"}
    question = Question(id="x", text=text, answers=(text, "Ada"), meta=meta)
    if titles:
        question.meta["supporting_ids"] = supporting_meta(titles)
    path = tmp_path_factory.mktemp("w") / "q.jsonl"
    write_questions(path, [question])
    (found,) = read_questions(QuestionSource(path=path))
    assert (found.text, found.answers, found.source) == (question.text, question.answers, source)
    assert found.supporting == question.supporting and found.meta["split"] == "train"


def test_any_format_converts_and_own_columns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    musique = {"id": "m", "question": "who ?", "answer": "Ada", "answer_aliases": ["A. L."], "answerable": True}
    source, out = tmp_path / "m.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps([musique, musique | {"id": "n", "answerable": False}]))
    assert run("convert", source, out) == 0
    assert (
        "wrote 1 questions" in (said := capsys.readouterr().out)
        and "2 rows read: 1 written, 1 dropped: without an answer" in said
    )
    assert records(out) == [{"id": "m", "question": "who ?", "answers": ["Ada", "A. L."], "source": "musique"}]

    pq.write_table(pa.Table.from_pylist([{"key": 7, "query": "who ?", "gold": "Ada"}]), tmp_path / "own.parquet")
    assert run("convert", tmp_path / "own.parquet", out) == 2
    said = capsys.readouterr().err
    assert "gold, key, query" in said and "own-converted.jsonl --question query --answers gold, or" in said
    assert run("convert", tmp_path / "own.parquet", out, "--question", "querry", "--answers", "gold") == 2
    assert "no column `querry`: did you mean 'query'?" in capsys.readouterr().err
    columns = ("--question", "query", "--answers", "gold", "--id", "key", "--source", "mine")
    assert run("convert", tmp_path / "own.parquet", out, *columns) == 0
    assert records(out) == [{"id": "7", "question": "who ?", "answers": ["Ada"], "source": "mine"}]


def test_passages_of_questions_convert_to_a_corpus(tmp_path: Path) -> None:
    source = tmp_path / "h.json"
    record = {"_id": "h", "question": "who ?", "answer": "Ada", "supporting_facts": [["Ada", 0]]}
    source.write_text(json.dumps([record | {"context": [["Ada", ["Ada wrote."]], ["Bell", ["Rang."]]]}]))
    assert run("convert", source, tmp_path / "c.jsonl", "--corpus") == 0
    assert [row["contents"] for row in records(tmp_path / "c.jsonl")] == ['"Ada"\nAda wrote.', '"Bell"\nRang.']
    assert run("convert", source, tmp_path / "q.jsonl") == 0
    assert records(tmp_path / "q.jsonl")[0]["supporting_ids"] == ["Ada"]


def test_a_merge_has_the_shares_of_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", *(asked(str(n), f"a {n} ?") for n in range(40)))
    b = write(tmp_path / "b.jsonl", *(asked(str(n), f"b {n} ?") for n in range(20)))
    out = tmp_path / "m.jsonl"
    assert run("merge", a, b, "--out", out) == 0
    assert sorted(row["question"] for row in records(out)) == sorted(
        [f"a {n} ?" for n in range(40)] + [f"b {n} ?" for n in range(20)]
    )
    assert run("merge", a, b, "--weights", "1,3", "--out", out) == 0
    texts = [row["question"][0] for row in records(out)]
    assert (texts.count("a"), texts.count("b")) == (6, 20), "no question twice"
    assert texts != sorted(texts)
    first = out.read_bytes()
    assert run("merge", a, b, "--weights", "1,3", "--out", out) == 0 and out.read_bytes() == first
    capsys.readouterr()
    assert run("merge", a, b, "--weights", "1,3", "--rows", "60", "--out", out) == 2
    assert "at most 26 rows are possible" in capsys.readouterr().err
    assert run("merge", a, b, "--weights", "1,0", "--out", out) == 2


def test_a_split_keeps_equal_questions_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [asked(f"{n}-{copy}", f"Who is {n}{'?' * copy}") for n in range(50) for copy in range(2)]
    source = write(tmp_path / "q.jsonl", *questions)
    assert run("split", source, "train=rest", "dev=0.2", "test=10", "--out", tmp_path / "parts") == 0
    found = {name: records(tmp_path / "parts" / f"{name}.jsonl") for name in ("train", "dev", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 70, "dev": 20, "test": 10}
    texts = [{words_of(row["question"]) for row in rows} for rows in found.values()]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    capsys.readouterr()
    for wrong in (["train=0.9", "dev=0.2"], ["train=x"], ["train=0.5", "train=0.2"]):
        assert run("split", source, *wrong, "--out", tmp_path / "parts") == 2


def test_a_sample_is_random_and_of_the_size_asked_for(tmp_path: Path) -> None:
    source = write(tmp_path / "q.jsonl", *(asked(str(n), f"who {n} ?") for n in range(100)))
    out = tmp_path / "s.jsonl"
    assert run("sample", source, "--rows", "10", "--out", out) == 0
    ids = [int(row["id"]) for row in records(out)]
    assert len(set(ids)) == 10 and ids == sorted(ids) and ids != list(range(10))
    assert run("sample", source, "--rows", "101", "--out", out) == 2


TEST_SET = (
    asked("t1", "Who wrote the novel Emma in 1815?", "Jane Austen"),
    asked("t2", "What is the capital of France today?", "Paris"),
)


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (asked("a", "who wrote the novel EMMA in 1815", "Jane Austen"), "exact"),
        (asked("a", "Who wrote the famous novel Emma in 1815?", "Austen", "jane austen"), "near"),
        (asked("a", "Who wrote the novel Persuasion in 1815?", "Jane Austen"), ""),  # 6 of 8 words
        (asked("a", "What is the capital of Spain today?", "Madrid"), ""),
        (asked("a", "What is the capital of France today then?", "Lutetia"), ""),  # another answer
        (asked("a", "What is the capital of France today then?", "Paris"), "near"),
    ],
)
def test_what_a_test_set_has_too_is_removed(question: Question, kind: str) -> None:
    found = dedupe([question], TEST_SET, near=0.8)
    assert [match.kind for match in found.removed] == ([kind] if kind else [])
    assert found.kept == ([] if kind else [question])


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=8), st.lists(WORDS, min_size=1, max_size=8), st.sampled_from([0.5, 0.8, 1]))
def test_near_duplicates_are_those_of_all_pairs(train: list[str], test: list[str], near: float) -> None:
    found = dedupe([asked(str(n), text) for n, text in enumerate(train)], [asked("t", text) for text in test], near)

    def close(a: str, b: str) -> bool:
        x, y = set(a.split()), set(b.split())
        return len(x & y) / len(x | y) >= near

    kept = [question.text for question in found.kept]
    assert kept == list(dict.fromkeys(text for text in train if not any(close(text, other) for other in test)))


def test_signs_and_answers_tell_questions_apart() -> None:
    sums = [asked("1", "What is 7 + 3?", "10"), asked("2", "What is 7 - 3?", "4"), asked("3", "what is 7 + 3", "10")]
    names = [asked("4", "Who created C++?", "Stroustrup"), asked("5", "Who created C#?", "Hejlsberg")]
    same_text = asked("6", "who  created c#?", "Anders")
    found = dedupe([*sums, *names, same_text], [], 0)
    assert [question.id for question in found.kept] == ["1", "2", "4", "5"]
    assert [(match.question.id, match.other.id) for match in found.removed] == [("3", "1"), ("6", "5")]
    assert any("'what is 7 + 3' ~ 'What is 7 + 3?' (1)" in line for line in found.lines())
    assert [match.kind for match in dedupe(sums, [sums[1]], 0).removed] == ["exact", "repeated"]


def test_the_command_removes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(
        tmp_path / "train.jsonl",
        asked("1", "Who wrote the famous novel Emma in 1815?", "Jane Austen"),
        asked("2", "Where is Rome ?", "Italy"),
        asked("3", "where is rome?", "Italy"),
    )
    test = write(tmp_path / "test.jsonl", *TEST_SET)
    out = tmp_path / "clean.jsonl"
    assert run("dedupe", train, "--against", test, "--out", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("kept", "repeated", "exact", "near")} == {
        "kept": 1,
        "repeated": 1,
        "exact": 0,
        "near": 1,
    }
    assert [row["id"] for row in records(out)] == ["2"]
    assert run("dedupe", train, "--against", test, "--out", out, "--near", "0") == 0
    assert "0 near one of a test set" in capsys.readouterr().out and len(load_questions(out)) == 2
    assert run("dedupe", train, "--out", out, "--near", "8") == 2


def test_inspect_shows_what_may_go_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "q.jsonl",
        asked("1", "Which letter comes first ?", "A"),
        asked("1", "is it so?", "yes"),
        asked("3", "Is it so", "yes"),
    )
    assert run("inspect", path, "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["format"], report["sources"]) == (3, "foray", {"s": 3})
    assert (report["repeated_ids"], report["repeated_questions"], report["yes_or_no"]) == (1, 1, 2)
    assert report["empty_golds"]["questions"] == 1 and "'A' of 'Which letter" in report["empty_golds"]["examples"][0]
    assert report["schema"] == {"id": "text", "question": "text", "answers": "list of text", "source": "text"}
    assert sum(report["question_words"]["histogram"].values()) == 3
    assert run("inspect", path) == 0
    said = capsys.readouterr().out
    assert "answers that normalise to nothing: 1 in 1 questions" in said and "repeated ids: 1" in said
    (tmp_path / "c.jsonl").write_text('{"id": "0", "contents": "\\"Ada\\"\\nAda wrote."}\n')
    assert run("inspect", tmp_path / "c.jsonl") == 0
    assert "1 passages, format contents" in capsys.readouterr().out


def test_inspect_measures_prompts_with_a_runs_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    write_tokenizer(tmp_path / "model", "words")
    tree = {
        "run": {"model": str(tmp_path / "model")},
        "rollout": {"episode": {"template": "demo", "max_context": 64, "max_obs_tokens": 16}},
    }
    config.write_text(json.dumps(tree))
    path = write(tmp_path / "q.jsonl", asked("1", "who ?"), asked("2", "who " * 60))
    assert run("inspect", path, "--config", config, "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["prompts"]["max_context"] == 64 and report["prompts"]["too_long"] == 1


def test_the_table_of_formats_has_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("formats", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["of"] for row in rows} == {"questions", "corpus"}
    assert {"search_r1", "2wiki", "contents"} <= {row["name"] for row in rows}
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    wrong = [row["name"] for row in rows if f"| `{row['name']}` | {row['fields']} |\n" not in page]
    assert not wrong, "the tables of docs/data.md are those of `foray data formats`"
