"""Python objects become the files and settings of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.config import load_config
from foray.api import train
from foray.api.inputs import save_model, search_overrides, server_of, write_dataset
from foray.api.searcher import LocalSearch, Searcher
from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.messages import Question
from protocol.runtime.config import override


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "corpus.jsonl"
    path.parent.mkdir()
    rows = [{"id": name, "contents": f'"{name}"\n{name} was written by {who}.'} for name, who in (("Emma", "Austen"),)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_dataset_is_pairs_mappings_or_questions(tmp_path: Path) -> None:
    mixed: list[Any] = [
        ("Who discovered penicillin?", "Alexander Fleming"),
        ("Who wrote it?", ["Austen", "Jane Austen"]),
        {"id": "c", "question": "Where?", "golden_answers": ["here"]},
        Question(id="d", text="When?", answers=("now",)),
    ]
    path, count = write_dataset(mixed[:2], tmp_path)
    assert count == 2 and [q.answers for q in load_questions(path).questions] == [
        ("Alexander Fleming",),
        ("Austen", "Jane Austen"),
    ]
    path, _ = write_dataset(mixed[3:], tmp_path)
    assert load_questions(path).questions[0].answers == ("now",)
    path, _ = write_dataset(mixed[2:3], tmp_path)
    assert load_questions(path).questions[0].text == "Where?"
    assert write_dataset(path, tmp_path / "other") == (path.absolute(), 1)
    with pytest.raises(UserError, match="the dataset is empty"):
        write_dataset([], tmp_path)
    with pytest.raises(UserError, match="example 1 of the dataset is no question"):
        write_dataset([mixed[0], 3], tmp_path)  # type: ignore[list-item]


def test_a_searcher_opens_an_index_a_corpus_or_a_folder_with_one(corpus: Path) -> None:
    for searcher in (Searcher(corpus=corpus), LocalSearch(index_dir=corpus.parent), LocalSearch(f"{corpus}.index")):
        assert [p.id for p in searcher.search("who wrote Emma?")] == ["Emma"]
    with pytest.raises(UserError, match="needs an index or a corpus"):
        Searcher()


def test_a_search_engine_is_a_url_files_or_an_object(corpus: Path) -> None:
    assert search_overrides(None, None) == ['rollout.search={"type": "none"}']
    typed = "rollout.search.type=http"
    assert search_overrides("http://10.0.0.5:8000", None) == [typed, 'rollout.search.urls=["http://10.0.0.5:8000"]']
    for given in (corpus, str(corpus), Searcher(corpus=corpus)):
        assert search_overrides(given, None) == [
            typed,
            override("retriever.index_dir", f"{corpus}.index"),
            override("retriever.corpus", corpus),
            "rollout.search.topk=3",
        ]
    assert server_of(corpus, "em") is None
    with pytest.raises(UserError, match="a dict has no method search"):
        server_of({}, "em")


def test_the_file_of_the_run_is_that_of_init(
    corpus: Path, tmp_path: Path, run_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run_files / "model"
    started: list[Path] = []
    monkeypatch.setattr(train, "_start", lambda file, *_, **__: started.append(file))
    pairs = [(f"What is {n}?", str(n)) for n in range(20)]
    train.train_grpo(
        *(model, None, pairs, corpus),
        **{"epochs": 3, "lr": 1e-5, "hardware": "cpu", "run_dir": tmp_path / "run", "overrides": ["run.max_lag=0"]},
    )
    config = load_config(started[0])
    assert (config.run.groups_per_step, config.run.steps, config.run.max_lag) == (8, 8, 0)
    assert (config.run.model, config.learner.optim.lr, config.engine.kind.type) == (model, 1e-5, "cpu")
    assert config.retriever.corpus == corpus and config.rollout.episode.rewards[0].type == "em"
    assert len(load_questions(config.learner.questions).questions) == 20
    with pytest.raises(UserError, match="no preset 'grpo'"):
        train.train_grpo(model, None, pairs, corpus, preset="grpo", hardware="cpu", run_dir=tmp_path / "other")


def test_a_model_object_needs_its_tokenizer(tmp_path: Path) -> None:
    assert save_model("somewhere", None, tmp_path) == Path("somewhere").absolute()
    with pytest.raises(UserError, match="needs its tokenizer"):
        save_model(object(), None, tmp_path)  # type: ignore[arg-type]
