"""`foray data demonstrate`: each demonstration is an episode that the index really answers, and the parser accepts."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foray.cli import main
from protocol.search import Passage
from retriever.backends.index import open_searcher
from retriever.config import RetrieverSettings
from rollout_server.environment.actions import AnswerAction, SearchAction, parse

CORPUS = {
    "1": ("Emma", "Emma is a novel by Jane Austen about matchmaking in Highbury."),
    "2": ("Jane Austen", "Jane Austen was born at Steventon in Hampshire."),
    "3": ("Oak", "The oak is a tree with acorns and lobed leaves."),
    "4": ("Acorn", "The nut of trees, eaten by squirrels and jays."),
    "5": ("Ada", "Ada is a language for embedded systems."),
    "6": ("Zeppelin (airship)", "A rigid balloon with engines."),
    "7": ("Tin", "Tin is a soft metal."),
    "8": ("Tin", "Tin is a hard metal."),
}
TWO_HOPS = ("two", "Where was the author of the novel about Highbury born?", ["Steventon"], ["1", "2"])
QUESTIONS = [
    TWO_HOPS,
    ("one", "What are the leaves of the oak tree?", ["lobed"], ["3"]),
    ("both", "Are embedded systems and acorns the same?", ["no"], ["Ada", "Oak"]),
    ("plain", "Which language?", ["Ada"], []),
    ("nothing", "Qwerty uiop?", ["x"], ["4"]),
    ("unnamed", "Which tree has lobed leaves?", ["nut"], ["3", "6"]),
]
REASONS = {
    "plain": "the record names no supporting passage",
    "nothing": "the first search finds no supporting passage",
    "unnamed": "the title of a missing passage is not in the question or the results",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": name, "contents": f'"{title}"\n{text}'} for name, (title, text) in CORPUS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, *rows: tuple[str, str, list[str], list[str]]) -> Path:
    records = [{"id": n, "question": q, "answers": a, "supporting_ids": s} for n, q, a, s in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(out: Path, capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert main(["data", "demonstrate", *map(str, argv), "--out", str(out), "--json"]) == 0
    return json.loads(capsys.readouterr().out), [json.loads(line) for line in out.read_text().splitlines()]


def check(made: dict[str, Any], answer: str, box: bool = False) -> list[str]:
    """Return the queries, after checking that turns and observations alternate and each turn is what it should be."""
    segments = made["segments"]
    assert len(segments) % 2 == 1 and all("passages" in s for s in segments[1::2])
    turns = [segment["text"] for segment in segments[::2]]
    assert all(segment["train"] is True for segment in segments[::2])
    *searches, last = [parse(turn, box=box) for turn in turns]
    assert last == AnswerAction(answer) and all(isinstance(action, SearchAction) for action in searches)
    assert all(turn.startswith("<think> ") and turn.count("</think>") == 1 for turn in turns)
    return [action.query for action in searches if isinstance(action, SearchAction)]


def test_the_second_query_is_a_title_that_the_first_result_spells(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = questions(tmp_path / "q.jsonl", *QUESTIONS)
    report, made = run(tmp_path / "out.jsonl", capsys, file, "--corpus", corpus)
    assert (report["questions"], report["demonstrations"], report["topk"]) == (6, 3, 2)
    assert report["left_out"] == dict.fromkeys(REASONS.values(), 1)
    assert report["searches"] == {"1": 2, "2": 1}
    by_id = {one["id"]: one for one in made}
    two = by_id["two"]
    assert check(two, "Steventon") == [TWO_HOPS[1], "Jane Austen"]
    assert [segment["text"] for segment in two["segments"][::2]] == [
        f"<think> I need to find what the question is about. </think> <search> {TWO_HOPS[1]} </search>",
        "<think> I found Emma. Now I need Jane Austen. </think> <search> Jane Austen </search>",
        "<think> The passage on Jane Austen gives the answer. </think> <answer> Steventon </answer>",
    ]
    assert check(by_id["one"], "lobed") == [QUESTIONS[1][1]]
    assert by_id["one"]["segments"][0]["text"].startswith("<think> I need to find Oak. </think>")
    assert check(by_id["both"], "no") == [QUESTIONS[2][1]]
    assert "The passages on Ada and Oak give the answer." in by_id["both"]["segments"][-1]["text"]


def test_observations_are_what_the_index_returns(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = questions(tmp_path / "q.jsonl", *QUESTIONS)
    searcher = open_searcher(RetrieverSettings(corpus=corpus, index_dir=tmp_path / "index"))
    for topk in (1, 3):
        _, made = run(tmp_path / "out.jsonl", capsys, file, "--corpus", corpus, "--topk", topk)
        assert made
        for one in made:
            for turn, shown in zip(one["segments"][::2], one["segments"][1::2], strict=False):
                action = parse(turn["text"])
                assert isinstance(action, SearchAction)
                (found,) = searcher.search([action.query], topk)
                expected = [Passage.model_validate_json(document) for document in found.documents]
                assert [(p["id"], p["contents"]) for p in shown["passages"]] == [(p.id, p.contents) for p in expected]


def test_further_limits_and_reasons(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = ("lost", "Which soft metal is called tin, and which oak?", ["x"], ["7", "8", "3"])
    file = questions(tmp_path / "q.jsonl", TWO_HOPS, lost)
    report, _ = run(tmp_path / "out.jsonl", capsys, file, "--corpus", corpus, "--searches", 1)
    assert report["left_out"]["more searches would be needed"] >= 1 and report["demonstrations"] == 0
    report, _ = run(tmp_path / "out.jsonl", capsys, file, "--corpus", corpus, "--topk", 1)
    assert report["left_out"] == {"a search for its title does not find a passage": 1}
    first, again = (tmp_path / name for name in ("1.jsonl", "2.jsonl"))
    run(first, capsys, file, "--corpus", corpus)
    run(again, capsys, file, "--corpus", corpus)
    assert first.read_bytes() == again.read_bytes()
    assert run(tmp_path / "out.jsonl", capsys, file, "--corpus", corpus, "--limit", 1)[0]["questions"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"1.jsonl", "2.jsonl", "corpus.jsonl", "out.jsonl", "q.jsonl"}
    odd = corpus.rename(tmp_path / "a #b.jsonl")
    run(again, capsys, file, "--corpus", odd)
    assert first.read_bytes() == again.read_bytes()
    assert main(["data", "demonstrate", str(file), "--out", str(first)]) == 2
    assert main(["data", "demonstrate", str(file), "--out", str(first), "--corpus", str(corpus), "--topk", "0"]) == 2


def test_the_configuration_gives_template_and_number_of_passages(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    rollout = {"search": {"type": "http", "topk": 1}, "episode": {"template": "research_base"}}
    config.write_text(json.dumps({"retriever": {"corpus": str(corpus)}, "rollout": rollout}))
    report, made = run(tmp_path / "out.jsonl", capsys, questions(tmp_path / "q.jsonl", TWO_HOPS), "--config", config)
    assert report["topk"] == 1 and {len(s["passages"]) for s in made[0]["segments"][1::2]} == {1}
    assert check(made[0], "Steventon", box=True)


@pytest.mark.data
def test_real_questions_give_about_four_hundred(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(os.environ.get("FORAY_DATA", ""))
    if not (directory / "corpus_multihop.jsonl").is_file():
        pytest.skip("FORAY_DATA does not name a directory with corpus_multihop.jsonl")
    file, corpus = directory / "questions_train.jsonl", directory / "corpus_multihop.jsonl"
    report, made = run(tmp_path / "demos.jsonl", capsys, file, "--corpus", corpus)
    assert report["questions"] == 615 and 390 <= report["demonstrations"] <= 420
    assert report["searches"]["2"] > report["searches"]["1"] > 150
    golds = {json.loads(line)["id"]: json.loads(line) for line in file.read_text().splitlines()}
    searches: Counter[int] = Counter()
    for one in made:
        gold = golds[one["id"]]
        searches[len(check(one, gold["golden_answers"][0].strip()))] += 1
        shown = {p["id"] for segment in one["segments"][1::2] for p in segment["passages"]}
        assert shown >= set(gold["supporting_ids"])
    assert {str(count): n for count, n in searches.items()} == report["searches"]
