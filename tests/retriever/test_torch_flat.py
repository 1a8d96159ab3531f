"""Exact search with torch: the hits are those of the numpy reference, whatever the precision and the distribution."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from protocol.errors import UserError
from retriever.index import torch_flat
from retriever.index.base import Hits
from retriever.index.config import TorchFlatSettings
from retriever.index.dense import QueryRescaler, exact_search
from retriever.index.devices import GpuShard

RNG = np.random.default_rng(0)


def crowded(count: int, dim: int, length: float = 1.0) -> np.ndarray:
    """Vectors around few centres: neighbours differ by less than float16 resolves."""
    centres = RNG.standard_normal((8, dim))
    vectors = centres[RNG.integers(0, 8, count)] + 1e-3 * RNG.standard_normal((count, dim))
    return (length * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def assert_same(found: Hits, wanted: Hits) -> None:
    assert found.rows.tolist() == wanted.rows.tolist()
    assert found.scores.tobytes() == wanted.scores.tobytes()


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hits_are_exact_where_float16_cannot_tell_neighbours_apart(
    precision: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_flat, "SPARE", 4)
    vectors, queries = crowded(1500, 32).astype(dtype), crowded(12, 32)
    index = torch_flat.TorchFlatVectors(TorchFlatSettings(precision=precision), vectors)
    assert_same(index.search(queries, 7), exact_search(vectors, queries, 7))


def test_candidates_alone_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is of value: without the margin hits differ."""
    vectors, queries = crowded(1500, 32), crowded(12, 32)
    monkeypatch.setattr(torch_flat, "SPARE", 0)
    index = torch_flat.TorchFlatVectors(TorchFlatSettings(), vectors)
    index._margin = -1.0
    assert index.search(queries, 7).rows.tolist() != exact_search(vectors, queries, 7).rows.tolist()


@pytest.mark.parametrize("length", [1e-3, 11.0])
def test_vectors_of_any_length(length: float) -> None:
    vectors, queries = crowded(300, 32, length), crowded(8, 32, 7.0)
    index = QueryRescaler(torch_flat.TorchFlatVectors(TorchFlatSettings(), vectors))
    wanted = exact_search(vectors.astype(np.float64), queries.astype(np.float64), 5)
    assert index.search(queries, 5).rows.tolist() == wanted.rows.tolist()


def test_shards_and_blocks_give_the_same_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, bounds = torch.device("cpu"), [0, 700, 701, 900, 1500]
    shards = [(cpu, GpuShard(i, *bounds[i : i + 2], 0)) for i in range(4)]
    monkeypatch.setattr(torch_flat, "_place", lambda *_: shards)
    monkeypatch.setattr(torch_flat, "_COPY_BYTES", 4 * 32 * 100)
    monkeypatch.setattr(torch_flat, "TEMP_BYTES", 10_000)
    vectors, queries = crowded(1500, 32), crowded(12, 32)
    index = torch_flat.TorchFlatVectors(TorchFlatSettings(), vectors)
    for k in (1, 7, 400, 1500):
        assert_same(index.search(queries, k), exact_search(vectors, queries, k))


@pytest.mark.parametrize("count", [1, 3, 131])
@pytest.mark.parametrize("width", [1, 130, 131, 2048, 10_007])
@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_by_chunks_are_those_of_topk(count: int, width: int, ties: bool) -> None:
    scores = torch.randn((5, width), generator=torch.Generator().manual_seed(0))
    scores = scores.round() if ties else scores
    values, columns = torch_flat.largest(scores, count)
    assert torch.equal(values, scores.topk(min(count, width), dim=1).values)
    assert torch.equal(scores.gather(1, columns), values)
    assert all(len(set(row)) == len(row) for row in columns.tolist())


def test_the_scan_sorts_few_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda t, *a, **k: seen.append(t.shape[1]) or topk(t, *a, **k))
    torch_flat.scan(torch.randn(40_000, 8), torch.randn(2, 8), 10, most=80_000)
    assert sum(seen) < 40_000 / 20


def test_a_file_of_faiss_is_served_as_it_is(tmp_path: Path) -> None:
    flat = faiss.IndexFlatIP(32)
    vectors, queries = crowded(200, 32), crowded(9, 32)
    flat.add(vectors)
    faiss.write_index(flat, str(tmp_path / "e5_Flat.index"))
    settings = TorchFlatSettings(file=tmp_path / "e5_Flat.index")
    index = torch_flat.TorchFlatVectors(settings, torch_flat._open(settings, tmp_path))
    assert_same(index.search(queries, 3), exact_search(vectors, queries, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_gpus_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UserError, match="no GPU is visible"):
        torch_flat.TorchFlatVectors(TorchFlatSettings(devices=(0,)), crowded(9, 8))
