"""What can be known of GPU indexes without a GPU: which rows go where, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np
import pytest

from protocol.errors import UserError
from retriever.index import open_index, write_index
from retriever.index.config import FaissGpuSettings, FaissIvfSettings
from retriever.index.faiss_gpu import choose_devices, plan_shards
from tests.support.small_retriever import TextSource

GIB = 2**30
WIKI = 21_015_324

needs_no_gpu = pytest.mark.skipif(faiss.get_num_gpus() > 0, reason="a GPU is visible")


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_row_goes_to_one_gpu(count: int) -> None:
    shares = plan_shards(WIKI, 768, itemsize=2, devices=range(count), temp_bytes=0, free_bytes={})
    assert [share.device for share in shares] == list(range(count))
    assert shares[0].start == 0
    assert shares[-1].stop == WIKI
    assert all(a.stop == b.start for a, b in pairwise(shares))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_bytes_are_numbers_norms_and_scratch_memory() -> None:
    (share,) = plan_shards(1000, 768, itemsize=2, devices=[5], temp_bytes=77, free_bytes={})
    assert share.num_bytes == 1000 * (768 * 2 + 4) + 77


def test_gpus_without_a_row_get_none() -> None:
    assert [share[:3] for share in plan_shards(2, 8, itemsize=4, devices=[0, 1, 2], temp_bytes=0, free_bytes={})] == [
        (1, 0, 1),
        (2, 1, 2),
    ]


def test_wikipedia_fits_one_80_gb_gpu_as_float16_and_not_as_float32() -> None:
    free = {0: 79 * GIB}
    assert plan_shards(WIKI, 768, itemsize=2, devices=[0], temp_bytes=GIB // 2, free_bytes=free)[0].num_bytes < 31 * GIB
    with pytest.raises(UserError, match="do not fit on GPU 0") as refused:
        plan_shards(WIKI, 768, itemsize=4, devices=[0], temp_bytes=20 * GIB, free_bytes=free)
    assert "needs 80.2 GiB and has 79.0 GiB free" in refused.value.render()


def test_only_the_gpu_that_is_full_is_named() -> None:
    with pytest.raises(UserError, match=r"on GPU 1$"):
        plan_shards(WIKI, 768, itemsize=2, devices=[0, 1], temp_bytes=0, free_bytes={0: 40 * GIB, 1: 2 * GIB})


def test_all_visible_gpus_are_taken_unless_some_are_named() -> None:
    assert choose_devices((), supported=True, visible=2) == (0, 1)
    assert choose_devices((1, 0), supported=True, visible=2) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "supported", "visible", "says"),
    [
        ((), False, 0, "does not support GPUs"),
        ((), True, 0, "no GPU is visible"),
        ((0, 2, 3), True, 2, "GPU 2, 3 does not exist"),
        ((0, 0), True, 2, "twice"),
    ],
)
def test_gpus_that_are_not_there_are_refused(asked: tuple[int, ...], supported: bool, visible: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        choose_devices(asked, supported=supported, visible=visible)


@needs_no_gpu
def test_an_index_is_built_without_a_gpu_and_says_so_when_it_is_opened(tmp_path: Path) -> None:
    write_index(FaissGpuSettings(), TextSource(["one", "two"]), tmp_path)
    with pytest.raises(UserError, match="GPU"):
        open_index(FaissGpuSettings(), tmp_path, threads=1)


@needs_no_gpu
def test_lists_on_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    settings = FaissIvfSettings(exact_below=0, devices=(0,))
    write_index(settings, TextSource([f"text {i}" for i in range(50)]), tmp_path)
    with pytest.raises(UserError, match="GPU"):
        open_index(settings, tmp_path, threads=1)


def test_shards_of_shards_count_rows_on_as_the_gpu_index_relies_on() -> None:
    """The same tree as `faiss_gpu.GpuFlat`, over CPU parts."""
    vectors = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    kept, top = [], faiss.IndexShards(8, True, True)  # type: ignore[call-arg]
    for start, stop, step in ((0, 40, 15), (40, 100, 60)):
        inner = faiss.IndexShards(8, False, True)  # type: ignore[call-arg]
        for first in range(start, stop, step):
            piece = faiss.IndexFlatIP(8)
            piece.add(vectors[first : min(first + step, stop)])
            inner.add_shard(piece)
            kept.append(piece)
        top.add_shard(inner)
        kept.append(inner)
    queries = vectors[:5]
    scores, rows = top.search(queries, 70)
    expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :70]
    assert (rows == expected).all()
    assert np.isfinite(scores).all()
