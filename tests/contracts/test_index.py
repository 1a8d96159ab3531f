"""What every index promises, for every member of the settings' union."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from retriever.config_index import IndexSettings
from retriever.index.base import Index
from retriever.testing import TextSource

MEMBERS = get_args(get_args(IndexSettings)[0])

TEXTS = [
    '"Marie Curie"\nMarie Curie discovered radium in Paris.',
    '"Paris"\nParis is the capital of France.',
    '"Warsaw"\nWarsaw is the capital of Poland; Marie Curie was born there.',
    '"東京"\n東京 は日本の首都 である。',
    '"Paris"\nParis is the capital of France.',
    "",
    '"Paris"\nParis is the capital of France.',
    '"Radium"\nRadium is a chemical element.',
]
QUERIES = ["Who discovered radium?", "capital of France", "東京 日本の首都", "zzz qqq", "???", "Curie born", "Paris"]


@pytest.fixture(params=MEMBERS, ids=lambda member: member.model_fields["type"].default)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[str]], Index]:
    """Build and open an index of one type over some texts."""

    def build(texts: list[str]) -> Index:
        settings = request.param()
        directory = tmp_path / f"index{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        settings.build(TextSource(texts), directory)
        opened: Index = settings.open(directory, threads=1)
        return opened

    return build


def test_the_best_hits_are_the_passages_that_answer(make: Callable[[list[str]], Index]) -> None:
    rows = make(TEXTS).search(QUERIES[:3], 1).rows
    assert rows[:, 0].tolist() == [0, 1, 3]


def test_hits_have_the_promised_shapes_and_types(make: Callable[[list[str]], Index]) -> None:
    hits = make(TEXTS).search(QUERIES, 3)
    assert hits.rows.shape == hits.scores.shape == (len(QUERIES), 3)
    assert hits.rows.dtype == np.int64
    assert hits.scores.dtype == np.float32
    assert np.isfinite(hits.scores).all()


def test_no_query_gives_no_hits(make: Callable[[list[str]], Index]) -> None:
    assert make(TEXTS).search([], 3).rows.shape == (0, 3)


@pytest.mark.parametrize("k", [8, 9, 1000])
def test_more_hits_than_passages_gives_every_passage_once(make: Callable[[list[str]], Index], k: int) -> None:
    index = make(TEXTS)
    assert index.ntotal == len(TEXTS)
    for rows in index.search(QUERIES, k).rows:
        assert sorted(rows.tolist()) == list(range(len(TEXTS)))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_hits_come_by_score_and_then_by_row(make: Callable[[list[str]], Index], k: int) -> None:
    hits = make(TEXTS).search(QUERIES, k)
    for rows, scores in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        pairs = [(-score, row) for score, row in zip(scores, rows, strict=True)]
        assert pairs == sorted(pairs)


def test_equal_passages_come_in_the_order_of_the_corpus(make: Callable[[list[str]], Index]) -> None:
    for k in (1, 2, 3):
        assert make(TEXTS).search(["the capital of France"], k).rows[0].tolist() == [1, 4, 6][:k]


def test_a_tie_larger_than_any_candidate_list_is_cut_at_the_lowest_rows(make: Callable[[list[str]], Index]) -> None:
    texts = ["something else entirely"] + ["one and the same passage"] * 300
    hits = make(texts).search(["the same passage", "???"], 4)
    assert hits.rows[0].tolist() == [1, 2, 3, 4]
    assert len(set(hits.scores[0].tolist())) == 1
    assert hits.rows[1].tolist() == [0, 1, 2, 3]


def test_a_querys_hits_do_not_depend_on_its_batch(make: Callable[[list[str]], Index]) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(60)]
    texts = [" ".join(rng.choice(words, 12)) for _ in range(400)]
    queries = [" ".join(rng.choice(words, 4)) for _ in range(70)]
    index = make(texts)
    together = index.search(queries, 5)
    for i, query in enumerate(queries):
        alone = index.search([query], 5)
        assert alone.rows[0].tolist() == together.rows[i].tolist()
        assert alone.scores[0].tobytes() == together.scores[i].tobytes()


def test_fewer_hits_are_a_prefix_of_more(make: Callable[[list[str]], Index]) -> None:
    index = make(TEXTS)
    many = index.search(QUERIES, 8)
    for k in range(1, 8):
        assert (index.search(QUERIES, k).rows == many.rows[:, :k]).all()


def test_a_corpus_of_one_blank_passage_can_be_searched(make: Callable[[list[str]], Index]) -> None:
    hits = make([""]).search(["anything", "???"], 3)
    assert hits.rows.tolist() == [[0], [0]]
    assert hits.scores.tolist() == [[0.0], [0.0]]


def test_building_twice_gives_the_same_hits(make: Callable[[list[str]], Index]) -> None:
    first, second = make(TEXTS).search(QUERIES, 8), make(TEXTS).search(QUERIES, 8)
    assert (first.rows == second.rows).all()
    assert first.scores.tobytes() == second.scores.tobytes()
