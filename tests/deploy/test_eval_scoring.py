"""Metrics, evidence, classes of failure, suites and published rows of `foray eval`."""

from __future__ import annotations

import json
import statistics as stdlib
from pathlib import Path
from typing import Any

import pytest

from foray.evaluation.published import ROWS, rows_for
from foray.evaluation.scoring import FAILURES, failure_of, has_evidence, is_correct
from foray.evaluation.suites import SUITES, data_set, read_suites
from protocol.errors import UserError
from protocol.messages import Question
from rollout_server.rewards.text_match import is_yes_no, score, yes_no


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("The Jane  Austen!", ["Jane Austen"], (1.0, 1.0, 1.0)),
        ("by Jane Austen", ["Emma", "Jane Austen"], (0.0, 0.8, 1.0)),
        ("Austen", ["Jane Austen"], (0.0, 2 / 3, 0.0)),
        ("Charlotte Brontë", ["Jane Austen"], (0.0, 0.0, 0.0)),
        ("I do not know", ["no"], (0.0, 0.0, 0.0)),
        (None, ["Jane Austen"], (0.0, 0.0, 0.0)),
        ("", ["Jane Austen"], (0.0, 0.0, 0.0)),
        ("anything", [], (0.0, 0.0, 0.0)),
    ],
)
def test_exact_match_f1_and_cover_match(answer: str | None, golds: list[str], expected: tuple[float, ...]) -> None:
    found = score(answer, golds)
    assert (found["em"], found["f1"], found["cover_em"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        *(("Yes.", "yes", 1), ("No, it is not", "no", 1), ("true", "yes", 1), ("False", "no", 1)),
        *(("not sure", "no", 0), ("The answer is yes", "yes", 0), ("", "no", 0), ("yes", "no", 0)),
    ],
)
def test_yes_and_no_are_decided_by_the_first_word(answer: str, gold: str, right: int) -> None:
    assert yes_no(answer, [gold]) == right == score(answer, [gold])["yes_no"]
    assert "yes_no" not in score(answer, ["Paris"]) and is_yes_no(["Yes"]) and not is_yes_no([])
    assert is_correct(score(answer, [gold])) == bool(right), "where the golds are yes or no it decides"


def segment(text: str, *, owner: str = "environment", ids: tuple[str, ...] = ("7",), **more: Any) -> dict[str, Any]:
    return {"owner": owner, "text": text, "passage_ids": list(ids), **more}


@pytest.mark.parametrize(
    ("segments", "found"),
    [
        ([segment("It is by Jane Austen's hand.")], True),
        ([segment("a novel", ids=("9",))], True),
        ([segment("a novel", titles=["emma"])], True),
        ([segment("Doc 1(Title: Emma) a novel")], True),
        ([segment("Emmanuel, a novel")], False),
        ([segment("a novel")], False),
        ([segment("Jane Austen", owner="policy")], False),
        ([segment("My previous action is invalid, Jane Austen", ids=())], False),
        ([], False),
    ],
)
def test_evidence_is_a_passage_with_the_answer_or_a_supporting_one(segments: list[Any], found: bool) -> None:
    question = Question(id="q", text="?", answers=("Jane Austen",), meta={"supporting_ids": "9,Emma"})
    assert has_evidence(question, segments) is found


def test_evidence_for_yes_or_no_is_unknown_without_supporting_passages() -> None:
    text = [segment("yes, no doubt")]
    assert has_evidence(Question(id="q", text="?", answers=("yes",)), text) is None
    known = Question(id="q", text="?", answers=("yes",), meta={"supporting_ids": "7"})
    assert has_evidence(known, text) is True


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({"correct": True}, ""),
        ({"answer": None}, "format"),
        ({"answer": " "}, "format"),
        ({"searches": 0}, "no_search"),
        ({"evidence": False}, "no_evidence"),
        ({"evidence": True}, "evidence_ignored"),
        ({"evidence": None}, "evidence_unknown"),
    ],
)
def test_a_wrong_answer_has_one_class(given: dict[str, Any], failure: str) -> None:
    wrong: dict[str, Any] = {"correct": False, "answer": "x", "searches": 2, "evidence": False}
    assert failure_of(**(wrong | given)) == failure
    assert not failure or failure in FAILURES


def test_published_rows_have_the_averages_that_the_paper_prints() -> None:
    averages = {
        "Search-R1 Qwen2.5-7B base, PPO": 43.1,
        "Search-R1 Qwen2.5-7B base, GRPO": 35.0,
        "Search-R1 Qwen2.5-7B instruct, PPO": 38.5,
        "Search-R1 Qwen2.5-7B instruct, GRPO": 39.6,
        "Search-R1 Qwen2.5-3B base, PPO": 30.3,
        "Search-R1 Qwen2.5-3B base, GRPO": 31.2,
        "Search-R1 Qwen2.5-3B instruct, PPO": 32.5,
        "Search-R1 Qwen2.5-3B instruct, GRPO": 33.6,
        "Search-R1's RAG, Qwen2.5-7B": 30.4,
        "Search-R1's rejection sampling, Qwen2.5-7B": 34.8,
    }
    found = {row.system: stdlib.fmean(row.values.values()) for row in ROWS if len(row.values) == 7}
    assert found.keys() == averages.keys()
    assert all(found[name] == pytest.approx(average, abs=0.06) for name, average in averages.items())
    assert all(row.source and set(row.values) <= set(SUITES["search-r1"]) for row in ROWS)
    assert not rows_for(frozenset({"mine"})) and len(rows_for(frozenset({"nq"}))) == 10


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def record(id_: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "question": f"{id_}?", "answers": ["x"], **more}


def test_a_suite_is_read_from_its_directory(tmp_path: Path) -> None:
    places = ["hotpotqa/dev", "2wikimultihopqa_dev", "musique-dev", "bamboogle", "strategyqa/train"]
    for place in places:
        lines(tmp_path / f"{place}.jsonl", record("1"), record("2"))
    sets = read_suites(["research"], tmp_path, limit=1)
    assert [s.name for s in sets] == list(SUITES["research"]) and {len(s.questions) for s in sets} == {1}
    with pytest.raises(UserError, match="needs the data set nq"):
        read_suites(["search-r1"], tmp_path)


def test_files_are_named_by_their_records_by_the_user_or_by_themselves(tmp_path: Path) -> None:
    mixed = lines(tmp_path / "mixed.jsonl", record("1", dataset="nq"), record("1", dataset="popqa"), record("3"))
    one = lines(tmp_path / "dev.jsonl", record("1"))
    sets = read_suites([str(mixed), f"mine={one}"], tmp_path)
    assert [(s.name, len(s.questions)) for s in sets] == [("nq", 1), ("popqa", 1), ("mixed", 1), ("mine", 1)]
    with pytest.raises(UserError, match="two files have the data set 'nq'"):
        read_suites([str(mixed), f"nq={one}"], tmp_path)
    with pytest.raises(UserError, match="cannot read the questions"):
        read_suites([str(tmp_path / "none.jsonl")], tmp_path)


def test_a_data_set_is_known_by_its_questions_and_has_no_id_twice() -> None:
    questions = [Question(id=str(n), text="?", answers=("a",)) for n in range(3)]
    same, other = (
        data_set("a", questions),
        data_set("a", [*questions[:2], questions[2].model_copy(update={"text": "!"})]),
    )
    assert data_set("b", questions).fingerprint == same.fingerprint != other.fingerprint
    with pytest.raises(UserError, match="two questions with the id '0'"):
        data_set("a", [*questions, questions[0]])
