"""The contract of indexes, for every member of the settings' union; approximate ones have more tests at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pytest

from retriever.encoder.config import HashedEncoderSettings
from retriever.index import index_identity, open_index, search_time, write_index
from retriever.index.base import NO_ROW, Hits, Index
from retriever.index.bm25 import Bm25Index
from retriever.index.config import (
    Bm25Settings,
    FaissFlatSettings,
    FaissGpuSettings,
    FaissHnswSettings,
    FaissIvfPqSettings,
    FaissIvfSettings,
    HybridSettings,
    IndexBase,
    IndexSettings,
    MemoryIndexSettings,
)
from retriever.index.hybrid import HybridIndex
from tests.support.small_retriever import TextSource

SMALL: dict[str, Any] = {"encoder": HashedEncoderSettings(dim=64)}
ROUGH: dict[str, IndexBase] = {
    # small corpora too are searched approximately
    "hnsw": FaissHnswSettings(exact_below=0, m=8, ef_search=40, build_threads=1, **SMALL),
    "hnsw16": FaissHnswSettings(exact_below=0, m=8, ef_search=40, build_threads=1, dtype="float16", **SMALL),
    "ivf": FaissIvfSettings(exact_below=0, nlist=8, nprobe=4, **SMALL),
    "ivf16": FaissIvfSettings(exact_below=0, nlist=8, nprobe=4, dtype="float16", **SMALL),
    "ivfpq": FaissIvfPqSettings(exact_below=0, nlist=8, nprobe=4, pq_bits=4, **SMALL),
    "opq": FaissIvfPqSettings(exact_below=0, nlist=8, nprobe=4, pq_bits=4, opq=True, **SMALL),
}
MEMBERS: dict[str, IndexBase] = {
    **{member.model_fields["type"].default: member() for member in get_args(get_args(IndexSettings)[0])},
    "flat16": FaissFlatSettings(dtype="float16"),
    "memory16": MemoryIndexSettings(dtype="float16"),
}
FUSED = HybridSettings(members=(Bm25Settings(), ROUGH["hnsw"], ROUGH["ivfpq"]), weights=(1, 2, 0.5), candidates=20)

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


Make = Callable[[list[str]], Index]


def made(settings: Any, texts: list[str], directory: Path) -> Index:
    """Build and open, or skip where no GPU is."""
    if isinstance(settings, FaissGpuSettings) and not faiss.get_num_gpus():
        pytest.skip("no GPU, or a FAISS without GPU support")
    directory.mkdir()
    write_index(settings, TextSource(texts), directory)
    opened: Index = open_index(settings, directory, threads=1)
    return opened


@pytest.fixture(params=MEMBERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Build and open an index of one type over some texts."""
    return lambda texts: made(MEMBERS[request.param], texts, tmp_path / f"index{len(list(tmp_path.iterdir()))}")


def test_the_best_hits_are_the_passages_that_answer(make: Make) -> None:
    rows = make(TEXTS).search(QUERIES[:3], 1).rows
    assert rows[:, 0].tolist() == [0, 1, 3]


def test_hits_have_the_promised_shapes_and_types(make: Make) -> None:
    hits = make(TEXTS).search(QUERIES, 3)
    assert hits.rows.shape == hits.scores.shape == (len(QUERIES), 3)
    assert hits.rows.dtype == np.int64
    assert hits.scores.dtype == np.float32
    assert np.isfinite(hits.scores).all()


def test_no_query_gives_no_hits(make: Make) -> None:
    assert make(TEXTS).search([], 3).rows.shape == (0, 3)


@pytest.mark.parametrize("k", [8, 9, 1000])
def test_more_hits_than_passages_gives_every_passage_once(make: Make, k: int) -> None:
    index = make(TEXTS)
    assert index.ntotal == len(TEXTS)
    for rows in index.search(QUERIES, k).rows:
        assert sorted(rows.tolist()) == list(range(len(TEXTS)))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_hits_come_by_score_and_then_by_row(make: Make, k: int) -> None:
    hits = make(TEXTS).search(QUERIES, k)
    for rows, scores in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        pairs = [(-score, row) for score, row in zip(scores, rows, strict=True)]
        assert pairs == sorted(pairs)


def test_equal_passages_come_in_the_order_of_the_corpus(make: Make) -> None:
    for k in (1, 2, 3):
        assert make(TEXTS).search(["the capital of France"], k).rows[0].tolist() == [1, 4, 6][:k]


def test_a_tie_larger_than_any_candidate_list_is_cut_at_the_lowest_rows(make: Make) -> None:
    texts = ["something else entirely"] + ["one and the same passage"] * 300
    hits = make(texts).search(["the same passage", "???"], 4)
    assert hits.rows[0].tolist() == [1, 2, 3, 4]
    assert len(set(hits.scores[0].tolist())) == 1
    assert hits.rows[1].tolist() == [0, 1, 2, 3]


def test_a_querys_hits_do_not_depend_on_its_batch(make: Make) -> None:
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


def test_fewer_hits_are_a_prefix_of_more(make: Make) -> None:
    index = make(TEXTS)
    many = index.search(QUERIES, 8)
    for k in range(1, 8):
        assert (index.search(QUERIES, k).rows == many.rows[:, :k]).all()


def test_a_corpus_of_one_blank_passage_can_be_searched(make: Make) -> None:
    index = make([""])
    hits = index.search(["anything", "???"], 3)
    assert hits.rows.tolist() == [[0], [0]]
    # fused scores are of ranks, and the dense member's first has one
    assert hits.scores.tolist() == [[float(np.float32(1 / 61)) if isinstance(index, HybridIndex) else 0.0]] * 2


def test_building_twice_gives_the_same_hits(make: Make) -> None:
    first, second = make(TEXTS).search(QUERIES, 8), make(TEXTS).search(QUERIES, 8)
    assert (first.rows == second.rows).all()
    assert first.scores.tobytes() == second.scores.tobytes()


def test_the_encoder_is_stated_where_there_is_one(make: Make) -> None:
    index = make(["one passage"])
    if isinstance(index, Bm25Index):
        assert index.encoder is None
    else:
        assert index.encoder is not None
        assert index.encoder.encode_queries(["x"]).shape == (1, index.encoder.dim)


# What approximate indexes owe. The texts are in groups, as real ones are; the queries are a passage's words.

WORDS = [[f"topic{t}word{i}" for i in range(30)] for t in range(20)]


def grouped(count: int, length: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS[i % len(WORDS)], length)) for i in range(count)]


PASSAGES, ASKED = grouped(600, 12, 0), grouped(40, 6, 1)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hits]:
    """All passages in order for every query, by the oracle, with vectors of either kind."""
    return {
        dtype: made(
            MemoryIndexSettings(dtype=dtype, **SMALL), PASSAGES, tmp_path_factory.mktemp("exact") / "index"
        ).search(ASKED, len(PASSAGES))
        for dtype in ("float32", "float16")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path, Index]]:
    """Settings, directory and opened index of each approximate kind, built once."""
    directory, done = tmp_path_factory.mktemp("rough"), dict[str, tuple[Any, Path, Index]]()

    def get(name: str) -> tuple[Any, Path, Index]:
        if name not in done:
            settings = FUSED if name == "fused" else ROUGH[name]
            done[name] = settings, directory / name, made(settings, PASSAGES, directory / name)
        return done[name]

    return get


Built = Callable[[str], tuple[Any, Path, Index]]
dense_and_fused = pytest.mark.parametrize("name", [*ROUGH, "fused"])
dense = pytest.mark.parametrize("name", ROUGH)


def share_found(hits: Hits, best: Hits) -> float:
    pairs = zip(hits.rows.tolist(), best.rows[:, :10].tolist(), strict=True)
    return float(np.mean([len(set(found) & set(wanted)) / 10 for found, wanted in pairs]))


@dense_and_fused
@pytest.mark.parametrize("k", [1, 10, 300, 1000])
def test_a_row_is_a_passage_once_or_none_after_all_others(built: Built, name: str, k: int) -> None:
    hits = built(name)[2].search(ASKED, k)
    assert hits.rows.shape == hits.scores.shape == (len(ASKED), min(k, len(PASSAGES)))
    for rows, scores in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        real = [row for row in rows if row != NO_ROW]
        assert rows == real + [NO_ROW] * (len(rows) - len(real))
        assert len(set(real)) == len(real)
        assert set(real) <= set(range(len(PASSAGES)))
        assert np.isfinite(scores[: len(real)]).all()
        assert set(scores[len(real) :]) <= {-np.inf}
        pairs = [(-score, row) for score, row in zip(scores, real, strict=False)]
        assert pairs == sorted(pairs)


@dense
def test_a_hits_score_is_the_exact_one(built: Built, name: str, exact: dict[str, Hits]) -> None:
    settings, _, index = built(name)
    hits = index.search(ASKED, 10)
    for i, (rows, scores) in enumerate(zip(hits.rows, hits.scores, strict=True)):
        of = dict(zip(exact[settings.dtype].rows[i].tolist(), exact[settings.dtype].scores[i].tolist(), strict=True))
        assert scores.tolist() == [of[row] for row in rows.tolist()]


@dense
def test_most_of_the_exact_hits_are_found(built: Built, name: str, exact: dict[str, Hits]) -> None:
    settings, _, index = built(name)
    assert share_found(index.search(ASKED, 10), exact[settings.dtype]) > 0.85


@dense_and_fused
def test_approximate_hits_do_not_depend_on_the_batch_either(built: Built, name: str) -> None:
    index = built(name)[2]
    together = index.search(ASKED, 5)
    for i, query in enumerate(ASKED):
        alone = index.search([query], 5)
        assert alone.rows[0].tolist() == together.rows[i].tolist()
        assert alone.scores[0].tobytes() == together.scores[i].tobytes()


@dense_and_fused
def test_an_approximate_index_is_the_same_when_built_again(built: Built, name: str, tmp_path: Path) -> None:
    settings, _, first = built(name)
    second = made(settings, PASSAGES, tmp_path / "again")
    for one, other in zip(first.search(ASKED, 10), second.search(ASKED, 10), strict=True):
        assert one.tobytes() == other.tobytes()


WIDER = {
    "hnsw": {"ef_search": 600},
    "hnsw16": {"ef_search": 600},
    "ivf": {"nprobe": 8},
    "ivf16": {"nprobe": 1000},
    "ivfpq": {"nprobe": 8, "refine": 60},
    "opq": {"nprobe": 8, "refine": 60},
}


@dense
def test_a_wider_search_needs_no_new_build_and_finds_them_all(built: Built, name: str, exact: dict[str, Hits]) -> None:
    settings, directory, _ = built(name)
    wider = settings.model_copy(update=WIDER[name])
    assert index_identity(wider) == index_identity(settings)
    assert search_time(wider) != search_time(settings)
    hits, best = open_index(wider, directory, threads=1).search(ASKED, 10), exact[settings.dtype]
    if isinstance(settings, FaissHnswSettings):  # a graph may have passages that no path leads to
        assert share_found(hits, best) > 0.97
    else:
        assert (hits.rows == best.rows[:, :10]).all()
        assert hits.scores.tobytes() == np.ascontiguousarray(best.scores[:, :10]).tobytes()


@dense_and_fused
def test_a_search_without_queries_finds_nothing(built: Built, name: str) -> None:
    assert built(name)[2].search([], 3).rows.shape == (0, 3)
