"""Inverted lists: the file that is filled in place is the one that FAISS would write, and is the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from protocol.errors import UserError
from retriever.encoder.config import HashedEncoderSettings
from retriever.index import faiss_ivf as faiss_ivf
from retriever.index import write_index
from retriever.index.config import FaissIvfPqSettings, FaissIvfSettings
from retriever.index.faiss_ivf import auto_nlist, auto_parts, exact_instead, train, write_filled
from tests.support.small_retriever import TextSource

DIM = 32


def unit(n: int, dtype: Any = np.float32) -> Any:
    vectors = np.random.default_rng(n).standard_normal((n, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("kind", ["flat", "float16", "pq", "opq"])
def test_the_lists_hold_what_faiss_itself_would_put_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = unit(1000, np.float16 if kind == "float16" else np.float32)
    settings: Any = FaissIvfSettings(nlist=20)
    if "pq" in kind:
        settings = FaissIvfPqSettings(nlist=20, pq_bits=4, pq_parts=8, opq=kind == "opq")
    index, rotation = train(settings, vectors, 8)
    expected: Any = faiss.clone_index(index)
    turned = vectors.astype(np.float32) if rotation is None else rotation.apply(vectors)
    expected.add(turned)
    monkeypatch.setattr(faiss_ivf, "_BLOCK_BYTES", 130 * 4 * DIM)  # eight blocks, the last one short
    write_filled(index, rotation, vectors, tmp_path / "index")
    read: Any = faiss.read_index(str(tmp_path / "index"))
    assert read.ntotal == 1000
    lists = faiss.extract_index_ivf(read)
    for number in range(20):
        size = expected.invlists.list_size(number)
        assert lists.invlists.list_size(number) == size
        for get, width in (("get_ids", 1), ("get_codes", index.code_size)):
            ours, theirs = (getattr(one.invlists, get)(number) for one in (lists, expected))
            assert (faiss.rev_swig_ptr(ours, size * width) == faiss.rev_swig_ptr(theirs, size * width)).all()


def test_a_file_of_lists_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    texts = [f"passage {i} about topic{i % 17}" for i in range(400)]
    settings = FaissIvfPqSettings(exact_below=0, pq_bits=4, encoder=HashedEncoderSettings(dim=DIM))
    built = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_index(settings, TextSource(texts), tmp_path / name)
        built.append((tmp_path / name / "index.faiss").read_bytes())
    assert built[0] == built[1]


def test_a_small_corpus_has_no_lists_and_is_searched_exactly(tmp_path: Path) -> None:
    write_index(FaissIvfSettings(), TextSource(["one", "two"]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npy"]
    assert exact_instead(FaissIvfSettings(), 9_999)
    assert not exact_instead(FaissIvfSettings(), 10_000)
    assert exact_instead(FaissIvfPqSettings(exact_below=0), 255)
    assert not exact_instead(FaissIvfPqSettings(exact_below=0), 256)


def test_lists_grow_with_the_root_of_the_corpus() -> None:
    assert [auto_nlist(n) for n in (1, 100, 16_793, 1_000_000, 21_015_324)] == [1, 2, 430, 4096, 16384]


@pytest.mark.parametrize(("dim", "parts"), [(768, 96), (384, 48), (100, 10), (7, 1), (13, 1)])
def test_parts_divide_the_dimension(dim: int, parts: int) -> None:
    assert auto_parts(dim) == parts


def test_parts_that_do_not_divide_the_dimension_are_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pq_parts=7 does not divide the encoder's 384"):
        write_index(FaissIvfPqSettings(pq_parts=7), TextSource(["x"]), tmp_path)
    assert not list(tmp_path.iterdir())
