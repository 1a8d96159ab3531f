"""Vectors longer than 1: exact indexes stay exact, to the bit of each score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from retriever.encoder.base import Vectors
from retriever.index import store
from retriever.index.base import VectorIndex
from retriever.index.dense import DenseIndex, exact_search, rescore
from retriever.index.exact import ExactVectors
from retriever.index.faiss_flat import FaissFlatVectors

DIM, LENGTH = 256, 30.0


class Numbered:
    """An encoder of ready-made queries: text i is row i."""

    dim, normalized = DIM, False

    def __init__(self, queries: Vectors) -> None:
        self._queries = queries

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._queries[[int(text) for text in texts]]

    encode_passages = encode_queries


@pytest.fixture
def vectors(tmp_path: Path) -> Vectors:
    """500 long vectors that all but coincide: their scores differ by less than float32 products are off."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=DIM)
    rows = base * LENGTH / np.linalg.norm(base) + rng.normal(size=(500, DIM)) * 3e-6
    stored = store.create(tmp_path, 500, DIM, "float32")
    stored[:] = rows
    return np.asarray(stored)


MAKE: dict[str, Callable[[Path, Vectors], VectorIndex]] = {
    "memory": lambda directory, _: ExactVectors(directory),
    "faiss_flat": lambda _, vectors: FaissFlatVectors(vectors, threads=1),
}


@pytest.mark.parametrize("kind", MAKE)
def test_near_ties_of_long_vectors_are_ranked_exactly(kind: str, vectors: Vectors, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    queries = (vectors[:20] + rng.normal(size=(20, DIM)) * 0.1).astype(np.float32)
    index = DenseIndex(Numbered(queries), MAKE[kind](tmp_path, vectors))
    hits = index.search([str(i) for i in range(20)], 7)
    every = np.broadcast_to(np.arange(500), (20, 500))
    scores = rescore(vectors, queries, every)
    expected = np.lexsort((every, -scores), axis=1)[:, :7]
    assert (hits.rows == expected).all()
    assert hits.scores.tobytes() == np.take_along_axis(scores, expected, axis=1).tobytes()
    # as they are, the bound for lengths of at most 1 would be too narrow for these
    assert (exact_search(vectors, queries, 7).rows != expected).any()


def test_a_blank_query_among_long_vectors_ties_with_all(vectors: Vectors, tmp_path: Path) -> None:
    index = DenseIndex(Numbered(np.zeros((1, DIM), np.float32)), MAKE["memory"](tmp_path, vectors))
    hits = index.search(["0"], 3)
    assert hits.rows.tolist() == [[0, 1, 2]]
    assert hits.scores.tolist() == [[0.0, 0.0, 0.0]]
