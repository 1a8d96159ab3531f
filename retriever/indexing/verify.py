"""Verify a built index: its content matches the manifest, and it finds its own passages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.runtime.files import below, sha256_file
from protocol.runtime.progress import Progress
from retriever.corpus.corpus import Corpus
from retriever.corpus.manifest import Manifest, check_manifest, corpus_of, read_manifest, settings_of
from retriever.encoder.base import Encoder
from retriever.index import index_identity, open_index, store
from retriever.index.base import Index
from retriever.index.config import IndexSettings

SAMPLE_ROWS = 100_000
"""Number of evenly spaced vectors to check, unless all are checked."""
PASSAGES = 5
"""Number of passages to search by their own text."""
FOUND_AMONG = 10
_EPSILON = {"float32": 1e-3, "float16": 5e-3}
"""Tolerance by which a vector may exceed length 1."""
_BLOCK = 4096


def verify_index(
    directory: Path,
    progress: Progress,
    *,
    corpus: Path | None = None,
    full: bool = False,
    quick: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the checks that passed, one line each. Raises UserError for the first failure.

    full     check every vector, not a sample      quick  sizes only, no checksums: seconds instead of minutes
    changes  settings of the index that differ from the build, e.g. {"encoder": {"device": "cpu"}}
    """
    manifest, settings = read_manifest(directory), settings_of(directory, changes)
    path = corpus_of(directory, corpus, verify=not quick)
    check_manifest(manifest, directory, index_identity(settings), path, verify_corpus=not quick)
    done = [f"{len(manifest.files)} files have the right sizes, the corpus the right {'size' if quick else 'SHA-256'}"]
    if not quick:
        done.append(_checksums(directory, manifest, progress))
    for file in (path for path in below(directory) if path.name == store.FILE):
        done.append(_vectors(file, manifest.passages, full=full))
    return [*done, *_searches(directory, manifest, settings, path)]


def _wrong(directory: Path, what: str, why: str) -> UserError:
    return UserError(f"{directory} is damaged: {what}", why=why, todo="rebuild the index with --overwrite")


def _checksums(directory: Path, manifest: Manifest, progress: Progress) -> str:
    done = 0
    with progress.task("checksums", manifest.index_bytes, "B") as task:
        for name, expected in manifest.checksums.items():
            if name != manifest.corpus and sha256_file(directory / name) != expected:
                raise _wrong(directory, name, "its content was changed: the SHA-256 differs")
            done += manifest.files[name]
            task(done)
    return f"{len(manifest.checksums)} files have the right SHA-256"


def _vectors(path: Path, passages: int, *, full: bool) -> str:
    vectors = store.open_vectors(path.parent)
    if len(vectors) != passages:
        raise _wrong(path.parent, path.name, f"{len(vectors)} rows, but {passages} passages")
    longest, looked = 0.0, 0
    for rows in _rows(passages, full=full):
        lengths = _lengths(vectors[rows])
        looked += len(lengths)
        if not np.isfinite(lengths).all():
            raise _wrong(path.parent, path.name, "some values are not finite")
        longest = max(longest, float(lengths.max(initial=0.0)))
    if longest > 1 + _EPSILON[vectors.dtype.name]:
        raise _wrong(path.parent, path.name, f"a vector has length {longest:.4f}, above 1")
    return f"{looked:,} of {passages:,} vectors x {vectors.shape[1]} are finite, the longest has length {longest:.4f}"


def _rows(passages: int, *, full: bool) -> Iterator[slice]:
    """Yield blocks of rows, all or evenly spread."""
    blocks = max(1, -(-passages // _BLOCK))
    step = 1 if full else max(1, blocks // max(1, SAMPLE_ROWS // _BLOCK))
    for block in range(0, blocks, step):
        yield slice(block * _BLOCK, min((block + 1) * _BLOCK, passages))


def _lengths(block: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    lengths: npt.NDArray[np.float64] = np.sqrt(np.square(block.astype(np.float64)).sum(axis=1))
    return lengths


def _searches(directory: Path, manifest: Manifest, settings: IndexSettings, path: Path) -> list[str]:
    index, corpus = open_index(settings, directory, threads=0), Corpus(path, directory)
    if not index.ntotal == len(corpus) == manifest.passages:
        counts = f"{index.ntotal} rows in the index, {len(corpus)} offsets, {manifest.passages} in the manifest"
        raise _wrong(directory, "its parts are inconsistent", counts)
    rows = sorted({round(i * (manifest.passages - 1) / max(PASSAGES - 1, 1)) for i in range(PASSAGES)})
    found, searched = 0, 0
    for row in rows:
        passage = corpus.passage(row)
        by_id = corpus.find(passage.id)
        if by_id is None:
            raise _wrong(directory, "its ids", f"id {passage.id!r} does not find the passage in row {row}")
        if _is_searchable(index.encoder, passage.contents):
            searched += 1
            found += _finds(index, corpus, passage.contents)
    # an approximate index may miss one, and a model may rank another passage higher; missing all is an error
    if searched and not found:
        raise _wrong(directory, "it does not find its passages", f"none of {searched} was found by its own text")
    return [f"{found} of {searched} passages are found by their own text, {len(rows)} of {len(rows)} by their id"]


def _finds(index: Index, corpus: Corpus, contents: str) -> bool:
    hits = index.search([contents], FOUND_AMONG).rows[0]
    return any(corpus.passage(int(row)).contents == contents for row in hits if row >= 0)


def _is_searchable(encoder: Encoder | None, contents: str) -> bool:
    """Return whether a passage can be found: not if it is blank or its vector is zero."""
    if not contents.strip():
        return False
    return encoder is None or bool(np.any(encoder.encode_passages([contents])))
