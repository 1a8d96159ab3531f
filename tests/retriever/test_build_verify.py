"""What is damaged is found, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from protocol.errors import UserError
from protocol.runtime.files import sha256_file
from protocol.runtime.progress import Progress
from retriever.corpus.manifest import MANIFEST
from retriever.index.config import IndexSettings
from retriever.indexing.build import build_index
from retriever.indexing.verify import verify_index

HASHED = {"type": "hashed", "dim": 32}


def quiet(_line: str) -> None:
    """Discarded progress."""


def built(directory: Path, **fields: Any) -> Path:
    """An index of 120 synthetic passages."""
    settings = TypeAdapter(IndexSettings).validate_python(fields)
    build_index("synthetic:120", directory, settings, progress=quiet)
    return directory


def verify(directory: Path, **options: Any) -> str:
    return "\n".join(verify_index(directory, Progress(quiet), **options))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "bm25"},
        {"type": "memory", "encoder": HASHED, "dtype": "float16"},
        {"type": "faiss_hnsw", "encoder": HASHED, "exact_below": 0, "m": 8, "build_threads": 1},
        {"type": "hybrid", "members": [{"type": "bm25"}, {"type": "faiss_flat", "encoder": HASHED}]},
    ],
    ids=lambda fields: fields["type"],
)
def test_a_sound_index_passes(tmp_path: Path, fields: dict[str, Any]) -> None:
    said = verify(built(tmp_path / "index", **fields), full=True)
    assert "5 of 5 passages are found by their own text, 5 of 5 by their id" in said
    assert "files have the right SHA-256" in said
    assert ("120 of 120 vectors x 32 are finite" in said) == (fields["type"] in ("memory", "hybrid"))


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x20
    path.write_bytes(content)


def _a_byte_of_a_vector(directory: Path) -> None:
    _flip(directory / "vectors.npy", 5000)


def _a_byte_of_the_offsets(directory: Path) -> None:
    _flip(directory / "offsets.npy", 500)


def _a_byte_of_the_corpus(directory: Path) -> None:
    _flip(directory / "corpus.jsonl", 1200)


def _a_missing_file(directory: Path) -> None:
    (directory / "id_rows.npy").unlink()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_a_byte_of_a_vector, "vectors.npy"),
        (_a_byte_of_the_offsets, "offsets.npy"),
        (_a_byte_of_the_corpus, "another corpus"),
        (_a_missing_file, "id_rows.npy is missing"),
    ],
)
def test_one_wrong_byte_is_found(tmp_path: Path, spoil: Callable[[Path], None], complaint: str) -> None:
    directory = built(tmp_path / "index", type="memory", encoder=HASHED)
    spoil(directory)
    with pytest.raises(UserError) as caught:
        verify(directory)
    assert complaint in caught.value.render()


def forge(directory: Path, change: Callable[[Any], None]) -> None:
    """Change the vectors, and the manifest with them: as if a broken encoder had written them."""
    vectors = np.load(directory / "vectors.npy", mmap_mode="r+")
    change(vectors)
    vectors.flush()
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["checksums"]["vectors.npy"] = sha256_file(directory / "vectors.npy")
    (directory / MANIFEST).write_text(json.dumps(manifest))


def _not_finite(vectors: Any) -> None:
    vectors[17, 3] = np.nan


def _too_long(vectors: Any) -> None:
    vectors[17] *= 1.1


def _opposite(vectors: Any) -> None:
    vectors *= -1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(_not_finite, "not finite"), (_too_long, "has length 1.1"), (_opposite, "none of 5 was found by its own text")],
)
def test_vectors_that_cannot_be_right_are_found(tmp_path: Path, change: Callable[[Any], None], complaint: str) -> None:
    directory = built(tmp_path / "index", type="memory", encoder=HASHED)
    forge(directory, change)
    with pytest.raises(UserError) as caught:
        verify(directory, full=True)
    assert complaint in caught.value.render()


def test_quick_skips_the_checksums_and_nothing_else(tmp_path: Path) -> None:
    directory = built(tmp_path / "index", type="memory", encoder=HASHED)
    _a_byte_of_the_offsets(directory)
    assert "SHA-256" not in verify(built(tmp_path / "sound", type="memory", encoder=HASHED), quick=True)
    (directory / "offsets.npy").write_bytes(b"")
    with pytest.raises(UserError, match="missing or damaged"):
        verify(directory, quick=True)
