"""FAISS and the numpy oracle agree bit for bit, and both with brute force in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from retriever.encoder.base import Vectors
from retriever.encoder.config import HashedEncoderSettings
from retriever.index import base, open_index, store, write_index
from retriever.index.base import Rows, Scores, top_rows
from retriever.index.config import FaissFlatSettings, MemoryIndexSettings
from retriever.index.dense import exact_search, search_candidates
from retriever.index.exact import ExactVectors
from retriever.index.faiss_flat import FaissFlatVectors
from tests.support.small_retriever import TextSource

DIM = 64


def unit(rng: np.random.Generator, n: int) -> Vectors:
    vectors = rng.standard_normal((n, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand vectors are several blocks."""
    monkeypatch.setattr("retriever.index.store.BLOCK_BYTES", 700 * 4 * DIM)
    monkeypatch.setattr("retriever.index.faiss_flat._WIDENED_BYTES", 700 * 4 * DIM)


def brute(vectors: Vectors, query: Vectors, k: int) -> list[int]:
    scores = np.float32([sum(float(a) * float(b) for a, b in zip(row, query, strict=True)) for row in vectors])
    return sorted(range(len(vectors)), key=lambda row: (-scores[row], row))[:k]


@pytest.mark.parametrize("batch", [1, 3, 4, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_faiss_equals_the_oracle_exactly(tmp_path: Path, batch: int, dtype: str, small_blocks: None) -> None:
    rng = np.random.default_rng(batch)
    vectors = unit(rng, 3000)
    vectors[1000:1050] = vectors[500]  # a tie that straddles FAISS's candidate list
    store.create(tmp_path, *vectors.shape, dtype)[:] = vectors
    queries = np.concatenate([vectors[500:501], np.zeros_like(vectors[:1]), unit(rng, 62)])[:batch]
    ours, oracle = FaissFlatVectors(store.open_vectors(tmp_path), threads=1), ExactVectors(tmp_path)
    for k in (1, 3, 10, 100):
        found, expected = ours.search(queries, k), oracle.search(queries, k)
        assert (found.rows == expected.rows).all()
        assert found.scores.tobytes() == expected.scores.tobytes()


def test_the_oracle_equals_brute_force() -> None:
    rng = np.random.default_rng(5)
    vectors, queries = unit(rng, 300), unit(rng, 6)
    vectors[100:140] = vectors[7]
    vectors[200] = np.nextafter(vectors[7], 1)  # differs in the last bits only
    queries[0] = vectors[7]
    hits = exact_search(vectors, queries, 20)
    assert [rows.tolist() for rows in hits.rows] == [brute(vectors, query, 20) for query in queries]


@pytest.mark.parametrize("k", [1, 5, 60, 500])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    rng = np.random.default_rng(6)
    vectors, queries = unit(rng, 200), unit(rng, 17)
    vectors[150:180] = vectors[3]
    queries[4], queries[5] = 0, vectors[3]
    whole = exact_search(vectors, queries, k)
    assert whole.rows[4].tolist() == list(range(min(k, 200)))
    monkeypatch.setattr("retriever.index.dense._QUERIES", 4)
    monkeypatch.setattr("retriever.index.dense._DOUBLES", 3 * DIM)
    monkeypatch.setattr("retriever.index.store.BLOCK_BYTES", 30 * 4 * DIM)
    for cut, expected in zip(exact_search(vectors, queries, k), whole, strict=True):
        assert cut.tobytes() == expected.tobytes()


def test_float16_and_unaligned_vectors_come_in_aligned_blocks_of_float32() -> None:
    vectors = unit(np.random.default_rng(7), 10)
    shifted = np.frombuffer(b"x" + vectors.tobytes(), dtype=np.float32, offset=1).reshape(vectors.shape)
    assert not shifted.flags.aligned
    for stored in (vectors, shifted, vectors.astype(np.float16)):
        seen = [(first, block.copy()) for first, block in store.blocks(stored, 1, 9, 3 * 4 * DIM)]
        assert [first for first, _ in seen] == [1, 4, 7]
        together = np.concatenate([block for _, block in seen])
        assert (together == stored[1:9].astype(np.float32)).all()
        assert all(block.flags.aligned for _, block in store.blocks(stored))


def test_a_float32_matrix_is_searched_without_a_copy() -> None:
    vectors = unit(np.random.default_rng(8), 10)
    assert all(np.shares_memory(block, vectors) for _, block in store.blocks(vectors))


def test_a_rough_search_that_ends_inside_a_tie_is_done_again_in_full() -> None:
    vectors = np.zeros((100, DIM), dtype=np.float32)
    vectors[:, 0] = 1

    def last_rows(queries: Vectors, count: int) -> tuple[Scores, Rows]:
        return np.ones((len(queries), count), np.float32), np.tile(np.arange(100 - count, 100), (len(queries), 1))

    assert search_candidates(last_rows, vectors, vectors[:1], 3, spare=2).rows.tolist() == [[0, 1, 2]]


def test_faiss_and_memory_agree_on_text(tmp_path: Path) -> None:
    texts = [f"passage {i} about topic{i % 7} and place{i % 11}" for i in range(500)]
    encoder = HashedEncoderSettings(dim=48)
    indexes = []
    for settings in (FaissFlatSettings(encoder=encoder), MemoryIndexSettings(encoder=encoder)):
        write_index(settings, TextSource(texts), tmp_path)
        indexes.append(open_index(settings, tmp_path, threads=1))
    queries = [f"topic{i} place{i}" for i in range(20)]
    first, second = (index.search(queries, 10) for index in indexes)
    assert (first.rows == second.rows).all()
    assert first.scores.tobytes() == second.scores.tobytes()


def test_top_rows_takes_the_lowest_positions_of_a_tie() -> None:
    scores = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], dtype=np.float32)
    assert [top_rows(scores, k).tolist() for k in range(1, 7)] == [
        [1], [1, 3], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4, 5], [1, 3, 2, 4, 5, 0],
    ]  # fmt: skip


ODD = np.array([0.0, 1.0, 1.5, -1.0, np.inf, -np.inf, np.nan], dtype=np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 600), st.integers(1, 600), st.integers(1, len(ODD)), st.booleans())
@hypothesis_settings(max_examples=150, deadline=None)
def test_the_best_of_blocks_are_the_best_of_all(seed: int, n: int, k: int, kinds: int, tied: bool) -> None:
    """With ties and scores that are not numbers, too: whatever a partition of all returns."""
    draw, k = np.random.default_rng(seed), min(k, n)
    scores = draw.choice(ODD[:kinds], n) if tied else draw.random(n, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "MIN_BLOCK", 1)
        found = top_rows(scores, k).tolist()
        patch.setattr(base, "MIN_BLOCK", n + 1)
        assert found == top_rows(scores, k).tolist()
    if not np.isnan(scores).any():
        assert found == sorted(range(n), key=lambda row: (-scores[row], row))[:k]


def test_few_of_many_scores_are_candidates() -> None:
    """So the work beside one pass over the scores grows with the root of their number, even if all are equal."""
    for n in (10_000, 100_000, 500_000):
        for scores in (np.zeros(n, np.float32), np.random.default_rng(n).random(n, dtype=np.float32)):
            assert len(base._candidates(scores, 3)) <= 2.5 * (n * 3) ** 0.5
