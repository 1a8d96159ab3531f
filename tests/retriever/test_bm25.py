"""BM25's scores against the formula written out."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from retriever.index import open_index, write_index
from retriever.index.base import Index
from retriever.index.bm25 import TextAnalyzer
from retriever.index.config import Bm25Settings
from tests.support.small_retriever import TextSource

words = TextAnalyzer(Bm25Settings())

TEXTS = ["the cat sat on the mat", "the dog", "a cat and a cat and another dog", "birds of prey"]


def open_over(settings: Bm25Settings, directory: Path) -> Index:
    write_index(settings, TextSource(TEXTS), directory)
    return open_index(settings, directory, threads=1)


def formula(query: str, k1: float, b: float) -> list[float]:
    """Lucene's BM25 (Kamphuis et al. 2020, table 1), with no factor (k1 + 1)."""
    documents = [words(text) for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    totals = []
    for document in documents:
        total = 0.0
        for word in words(query):
            holding = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            tf = document.count(word)
            total += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean)) if tf else 0.0
        totals.append(total)
    return totals


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4)])
@pytest.mark.parametrize("query", ["cat", "The CAT, the dog!", "dog dog", "prey of unseen birds"])
def test_scores_are_those_of_the_formula(tmp_path: Path, query: str, k1: float, b: float) -> None:
    hits = open_over(Bm25Settings(k1=k1, b=b), tmp_path).search([query], 4)
    expected = formula(query, k1, b)
    assert hits.scores[0].tolist() == pytest.approx([expected[row] for row in hits.rows[0].tolist()], rel=1e-5)
    assert hits.rows[0].tolist() == sorted(range(4), key=lambda row: (-round(expected[row], 6), row))


def test_stopwords_are_ignored_if_configured(tmp_path: Path) -> None:
    index = open_over(Bm25Settings(stopwords="english"), tmp_path)
    assert index.search(["the of and"], 4).scores[0].tolist() == [0, 0, 0, 0]
    assert index.search(["the cat"], 1).scores[0, 0] > 0


def test_words_are_lower_cased_and_at_least_two_characters() -> None:
    assert words("A Cat's 7 lives; ÉTÉ 東京 42") == ["cat", "lives", "été", "東京", "42"]


def test_queries_are_scored_by_as_many_threads_as_set_with_the_same_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(Bm25Settings(), TextSource(TEXTS), tmp_path)
    queries = ["cat", "dog", "prey of birds", "cat dog"]
    alone = open_index(Bm25Settings(), tmp_path, threads=1).search(queries, 3)
    together = threading.Barrier(4)
    terms = TextAnalyzer.__call__

    def when_all_are_there(self: TextAnalyzer, text: str) -> list[str]:
        together.wait(20)
        return terms(self, text)

    monkeypatch.setattr(TextAnalyzer, "__call__", when_all_are_there)
    hits = open_index(Bm25Settings(), tmp_path, threads=4).search(queries, 3)
    assert hits.rows.tolist() == alone.rows.tolist() and hits.scores.tolist() == alone.scores.tolist()
