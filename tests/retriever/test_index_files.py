"""FAISS files built elsewhere are served unchanged, or refused with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from protocol.errors import UserError
from retriever.encoder import build_encoder, encoder_identity
from retriever.encoder.base import Vectors
from retriever.encoder.config import HashedEncoderSettings
from retriever.index import index_identity, open_index, write_index
from retriever.index.base import Index
from retriever.index.config import (
    FaissFlatSettings,
    FaissHnswSettings,
    FaissIvfPqSettings,
    FaissIvfSettings,
    MemoryIndexSettings,
)
from retriever.index.faiss_flat import open_flat_file
from tests.support.small_retriever import TextSource

ENCODER = HashedEncoderSettings(dim=64)
TEXTS = [f"passage {i} about topic{i % 7} and place{i % 11} and thing{i % 13}" for i in range(900)]
QUERIES = [f"topic{i % 7} place{i % 11} thing{i % 13}" for i in range(30)]
IP = faiss.METRIC_INNER_PRODUCT

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return build_encoder(ENCODER).encode_passages(TEXTS)


@pytest.fixture
def write(vectors: Vectors, tmp_path: Path) -> Write:
    """Build with FAISS alone, as Search-R1's index_builder.py does, and write to a file."""

    def written(factory: str, metric: int = IP) -> Path:
        index = faiss.index_factory(vectors.shape[1], factory, metric)
        index.train(vectors)
        index.add(vectors)
        path = tmp_path / f"e5_{factory.replace(',', '_')}.index"
        faiss.write_index(index, str(path))
        return path

    return written


def served(settings: Any, directory: Path) -> Index:
    directory.mkdir()
    write_index(settings, TextSource(TEXTS), directory)
    assert list(directory.iterdir()) == []  # the file stays where it is, and nothing is copied
    opened: Index = open_index(settings, directory, threads=1)
    return opened


@pytest.mark.parametrize(("factory", "dtype"), [("Flat", "float32"), ("SQfp16", "float16")])
def test_a_flat_file_gives_what_our_own_vectors_give(write: Write, tmp_path: Path, factory: str, dtype: Any) -> None:
    ours = MemoryIndexSettings(encoder=ENCODER, dtype=dtype)
    write_index(ours, TextSource(TEXTS), tmp_path)
    theirs = served(FaissFlatSettings(encoder=ENCODER, file=write(factory)), tmp_path / "index")
    for k in (1, 10, 900):
        for found, expected in zip(
            theirs.search(QUERIES, k), open_index(ours, tmp_path, threads=1).search(QUERIES, k), strict=True
        ):
            assert found.tobytes() == expected.tobytes()


def test_a_flat_file_is_not_read_but_mapped(write: Write, vectors: Vectors) -> None:
    path = write("Flat")
    mapped = open_flat_file(path)
    assert (mapped == vectors).all()
    with path.open("r+b") as file:  # the map sees what is written to the file
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    assert mapped[-1, -1] == 7


def test_a_tie_over_all_of_a_mapped_file_is_searched_without_copying_it(tmp_path: Path) -> None:
    path = tmp_path / "same.index"
    index = faiss.IndexFlatIP(64)
    index.add(np.tile(build_encoder(ENCODER).encode_passages(["one and the same"]), (5000, 1)))
    faiss.write_index(index, str(path))
    opened = open_index(FaissFlatSettings(encoder=ENCODER, file=path), tmp_path, threads=1)
    assert opened.search(["the same", "???"], 3).rows.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("settings", "factory"),
    [
        (FaissHnswSettings, "HNSW64"),
        (FaissHnswSettings, "HNSW32_SQfp16"),
        (FaissIvfSettings, "IVF16,Flat"),
        (FaissIvfPqSettings, "IVF16,PQ16x4np"),
        (FaissIvfPqSettings, "OPQ16,IVF16,PQ16x4np"),
        (FaissIvfSettings, "IVF16_HNSW8,SQfp16"),
    ],
)
def test_graphs_and_lists_of_others_are_served(write: Write, tmp_path: Path, settings: Any, factory: str) -> None:
    index = served(settings(encoder=ENCODER, file=write(factory)), tmp_path / "index")
    exact = open_index(FaissFlatSettings(encoder=ENCODER, file=write("Flat")), tmp_path, threads=1)
    found, best = index.search(QUERIES, 10), exact.search(QUERIES, 10)
    shares = [len(set(a) & set(b)) / 10 for a, b in zip(found.rows.tolist(), best.rows.tolist(), strict=True)]
    assert np.mean(shares) > (0.9 if "PQ" not in factory else 0.5)
    if factory == "HNSW64":
        assert found.scores[0].tolist() == best.scores[0].tolist()  # scored again from the file's vectors
    alone = index.search(QUERIES[3:4], 10)
    assert alone.rows.tolist() == found.rows[3:4].tolist()
    assert alone.scores.tobytes() == found.scores[3:4].tobytes()


def test_the_vectors_of_a_graph_are_those_that_were_put_in(write: Write, vectors: Vectors) -> None:
    from retriever.index.faiss_flat import open_file, stored_vectors

    index = open_file(write("HNSW8"), faiss.IndexHNSW, "a graph")
    stored = stored_vectors(index)
    assert stored is not None
    assert (stored == vectors).all()


@pytest.mark.parametrize(
    ("settings", "factory", "metric", "says"),
    [
        (FaissFlatSettings, "HNSW8", IP, "IndexHNSWFlat, not a flat index"),
        (FaissHnswSettings, "Flat", IP, "IndexFlatIP, not a graph"),
        (FaissIvfSettings, "Flat", IP, "not an inverted file"),
        (FaissFlatSettings, "Flat", faiss.METRIC_L2, "does not use the inner product"),
        (FaissFlatSettings, "SQ8", IP, "quantised further"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    write: Write, tmp_path: Path, settings: Any, factory: str, metric: int, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        write_index(settings(encoder=ENCODER, file=write(factory, metric)), TextSource(TEXTS), tmp_path)


def test_a_file_of_another_corpus_or_encoder_is_refused(write: Write, tmp_path: Path) -> None:
    path = write("Flat")
    with pytest.raises(UserError, match="does not match this corpus") as refused:
        write_index(FaissFlatSettings(encoder=ENCODER, file=path), TextSource(TEXTS[1:]), tmp_path)
    assert "900 rows in the file, 899 passages" in refused.value.render()
    with pytest.raises(UserError, match="does not match this encoder") as refused:
        write_index(FaissFlatSettings(file=path), TextSource(TEXTS), tmp_path)
    assert "dimension 64, the encoder's 384" in refused.value.render()


def test_what_is_no_index_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not an index at all, only a text that is longer than any header")
    with pytest.raises(UserError, match="cannot read"):
        write_index(FaissFlatSettings(encoder=ENCODER, file=path), TextSource(TEXTS), tmp_path)
    with pytest.raises(UserError, match="cannot read the index file"):
        index_identity(FaissFlatSettings(encoder=ENCODER, file=tmp_path / "absent.index"))


def test_a_files_identity_follows_its_content_and_not_its_place(write: Write, tmp_path: Path) -> None:
    path = write("Flat")
    moved = Path(shutil.copy(path, tmp_path / "elsewhere.index"))
    settings = FaissFlatSettings(encoder=ENCODER, file=path)
    assert index_identity(settings.model_copy(update={"file": moved})) == index_identity(settings)
    assert index_identity(settings)["encoder"] == encoder_identity(ENCODER)
    content = bytearray(moved.read_bytes())
    content[-1] ^= 1
    moved.write_bytes(content)
    assert index_identity(settings.model_copy(update={"file": moved})) != index_identity(settings)
    assert index_identity(FaissFlatSettings(encoder=ENCODER)) != index_identity(settings)


def test_search_r1s_header_is_what_is_read(write: Write, vectors: Vectors, tmp_path: Path) -> None:
    """The layout of an IndexFlatIP file since 2017, written out: e5_Flat.index begins so."""
    head = b"IxFI" + np.int32(64).tobytes() + np.int64(900).tobytes() + np.int64([1 << 20] * 2).tobytes()
    head += b"\x01" + np.int32(0).tobytes() + np.uint64(vectors.size).tobytes()
    path = tmp_path / "by_hand.index"
    path.write_bytes(head + vectors.tobytes())
    assert path.read_bytes() == write("Flat").read_bytes()
    assert (open_flat_file(path) == vectors).all()
