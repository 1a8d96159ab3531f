"""`foray data coverage`: which questions the corpus can answer, by passages and by answer text, and what is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from deploy.config import load_config
from deploy.doctor.data import passages
from foray.cli import main
from foray.data.coverage import answer_phrases
from protocol.messages import Question
from retriever.backends.index import open_searcher

WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "lagoon")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """50 passages, "Place N" and the name of what is there, and 25 questions of two passages each."""
    draw = random.Random(5)
    names = [f"{draw.choice(WORDS)}{number}" for number in range(50)]
    rows = [{"id": f"p{n}", "contents": f'"Place {n}"\nOf place {n} they say: {names[n]}.'} for n in range(50)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [
        {
            "id": f"q{n}",
            "question": f"What do they say of place {n}, and of place {n + 25}?",
            "answers": [names[n].upper()],
            "supporting_ids": [f"p{n}", f"p{n + 25}"] if n % 2 else [f"Place {n}", f"Place {n + 25}"],
        }
        for n in range(25)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return tmp_path


def measured(world: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    given = ["data", "coverage", str(world / "questions.jsonl"), "--corpus", str(world / "corpus.jsonl")]
    assert main([*given, "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_whole_corpus_covers_all_questions(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(world, capsys)
    assert (found["questions"], found["passages"], found["without"]) == (25, 50, [])
    for kind in ("supporting", "answer"):
        assert found[kind]["questions"] == 25 and found[kind]["in_corpus"] == 1.0
        assert found[kind]["found"]["100"] == 1.0  # 50 passages
    assert 0 < found["supporting"]["found"]["3"] <= found["supporting"]["found"]["10"] <= 1.0


def test_the_questions_of_removed_passages_are_named_exactly(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (world / "corpus.jsonl").read_text().splitlines(keepends=True)
    removed = {1, 4, 7, 13, 26, 29, 40, 41, 48, 49}
    (world / "corpus.jsonl").write_text("".join(line for n, line in enumerate(lines) if n not in removed))
    lacking = {f"q{n}" for n in range(25) if n in removed or n + 25 in removed}
    without_answer = {f"q{n}" for n in range(25) if n in removed}
    found = measured(world, capsys, "--out", str(world / "without.jsonl"))
    assert {one["id"] for one in found["without"]} == lacking
    assert {json.loads(line)["id"] for line in (world / "without.jsonl").read_text().splitlines()} == lacking
    assert found["supporting"]["in_corpus"] == (25 - len(lacking)) / 25
    assert found["answer"]["in_corpus"] == (25 - len(without_answer)) / 25
    told = found["answer_text_tells_missing_passages"]
    assert told == {"precision": 1.0, "recall": len(without_answer) / len(lacking)}


def test_yes_and_no_are_not_judged_by_text(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_phrases(Question(id="a", text="?", answers=("Yes", "No.", "?"))) == set()
    assert answer_phrases(Question(id="a", text="?", answers=("The O\u2019Neill", "yes"))) == {" the o neill "}
    asked = {"id": "b", "question": "Is place 3 a place?", "answers": ["yes"]}
    (world / "questions.jsonl").write_text(json.dumps(asked) + "\n")
    found = measured(world, capsys)
    assert found["supporting"]["questions"] == found["answer"]["questions"] == 0 and found["without"] == []
    given = ["data", "coverage", str(world / "questions.jsonl"), "--corpus", str(world / "corpus.jsonl")]
    assert main(given) == 0 and "1 questions, 50 passages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("removed", "by_title", "verdict", "says"),
    [
        (0, False, "ok", "all supporting passages of 25 of 25 questions"),
        (12, False, "warn", "all supporting passages of 13 of 25 questions"),
        (0, True, "ok", "no supporting passage of 25 questions is an id of the corpus: titles, or another corpus"),
    ],
)
def test_doctor_and_up_say_how_many_questions_lack_passages(
    world: Path, removed: int, by_title: bool, verdict: str, says: str
) -> None:
    lines = (world / "corpus.jsonl").read_text().splitlines(keepends=True)
    (world / "corpus.jsonl").write_text("".join(lines[removed:]))
    rows = [json.loads(line) for line in (world / "questions.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        row["supporting_ids"] = [f"{'Place ' if by_title else 'p'}{place}" for place in (n, n + 25)]
    (world / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"retriever.corpus": "corpus.jsonl", "retriever.index_dir": "index", "learner.questions": "questions.jsonl"}
    config = load_config(None, [f"{name}={world / file}" for name, file in given.items()])
    assert [*passages(config)] == [], "without an index nothing is read"
    open_searcher(config.retriever)
    (found,) = passages(config)
    assert found.verdict == verdict and says in found.detail
    assert ("foray data coverage" in found.fix) == (verdict == "warn" or by_title)


def test_how_often_a_second_search_finds_what_is_missing_by_source_and_hops(tmp_path: Path, capsys: Any) -> None:
    """`a` names both passages; in `b` the second one is spelled in the first; in `c` nowhere."""
    texts = {"Ada": "Ada wrote notes.", "Bee": "Bee lived in Cork.", "Cork": "A port of the south.", "Dun": "A fort."}
    texts |= {"Ebb": "Where the town is, the sea is not.", "Fen": "Which fort is near?"}
    rows = [{"id": f"p{name}", "title": name, "text": text} for name, text in texts.items()]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [
        ("a", "Who was older, Ada or Bee?", ["pAda", "pBee"], "2wiki"),
        ("b", "Where is the town of Bee?", ["pBee", "pCork"], "2wiki"),
        ("c", "Which fort is near Ada?", ["pAda", "pDun"], "musique"),
        ("d", "Who wrote notes?", ["pAda"], "hotpotqa"),
    ]
    lines = [
        {"id": i, "question": text, "answers": ["x"], "source": source, "hops": 2, "supporting": names}
        for i, text, names, source in asked
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    searches = measured(tmp_path, capsys)["searches"]
    assert searches["topk"] == 2 and searches["all"]["questions"] == 3, (
        "a question of one passage needs no second search"
    )
    assert searches["2wiki 2"] == {"questions": 2, "first": 0.5, "second": 0.5, "not": {}}
    assert searches["musique 2"]["not"] == {"the title of a missing passage is not in the question or the results": 1.0}
    given = ["data", "coverage", str(tmp_path / "questions.jsonl"), "--corpus", str(tmp_path / "corpus.jsonl")]
    assert main(given) == 0
    assert "  2wiki 2                                            2      50.0%     100.0%" in capsys.readouterr().out


def test_supporting_passages_have_two_names_and_a_list_of_something_else_is_none(tmp_path: Path) -> None:
    from learner.data.questions import load_questions

    asked = [
        {"question": f"q{n}", "answers": ["x"], "supporting": value}
        for n, value in enumerate((["p1"], [{"a": 1}], "p"))
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert [q.supporting for q in load_questions(tmp_path / "questions.jsonl").questions] == [("p1",), (), ()]
