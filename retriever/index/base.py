"""The interface of indexes, and the order of hits.

Hits are ordered by (score descending, row ascending), exactly: equal passages come in the order of the corpus, and a
query's hits do not depend on which other queries share its batch. So a cached answer equals a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retriever.encoder.base import Encoder
from retriever.encoder.config import EncoderSettings

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


NO_ROW = -1
"""Row of a missing hit, with score -inf: approximate indexes may find fewer than k. Always after the real hits."""


class Hits(NamedTuple):
    """rows int64 [n, k'], scores float32 [n, k'] with k' = min(k, ntotal); rows are in [0, ntotal), or NO_ROW."""

    rows: Rows
    scores: Scores


class PassageSource(Protocol):
    """The passages that an index is built from. Can be streamed repeatedly; keeps no passage in memory."""

    @property
    def num_passages(self) -> int:
        """Return the number of passages, known before the first text is read."""

    def texts(self) -> Iterator[str]:
        """Yield the contents of every passage in the order of its row, from the start."""

    def vectors(self, encoder: EncoderSettings, dtype: Literal["float32", "float16"], directory: Path) -> None:
        """Encode every passage into `store.FILE` in `directory` ([num_passages, dim], see `index.store`).

        Bounded memory. After an interruption, a call with the same arguments resumes.
        """


class Index(Protocol):
    """A searchable index over passages 0 .. ntotal-1. Opened and searched by one thread only."""

    @property
    def ntotal(self) -> int:
        """Return the number of passages."""

    @property
    def encoder(self) -> Encoder | None:
        """Return the encoder of this index, None for a lexical one."""

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """Return the best min(k, ntotal) rows of every query, k >= 1, in the order of the module's docstring."""


class BuildableIndex(Index, Protocol):
    """Interface of a class in `retriever.index.config.REGISTRY`."""

    def __init__(self, settings: Any, directory: Path, *, threads: int) -> None:
        """Open what `build` wrote into `directory`. `threads`: see `RetrieverSettings`."""

    @staticmethod
    def build(settings: Any, source: PassageSource, directory: Path) -> None:
        """Build the index into `directory`, which exists."""


class VectorIndex(Protocol):
    """An index over vectors; `dense.DenseIndex` adds an encoder."""

    @property
    def ntotal(self) -> int:
        """Return the number of vectors."""

    def search(self, queries: npt.NDArray[np.float32], k: int) -> Hits:
        """Return the best rows; queries float32 [n, dim] of length at most 1."""


MIN_BLOCK = 16
"""Scores in a block below which one partition of all is as fast."""


def top_rows(scores: Scores, k: int) -> Rows:
    """Return the positions of the k best of `scores` [n], k <= n, by (score descending, position ascending)."""
    n = len(scores)
    if k >= n:
        chosen = np.arange(n)
    else:
        rows = _candidates(scores, k)
        left = scores[rows]
        # argpartition alone would pick arbitrary ones among ties with the k-th
        threshold = np.partition(left, len(left) - k)[len(left) - k]
        better = np.flatnonzero(left > threshold)
        equal = np.flatnonzero(left == threshold)[: k - len(better)]
        chosen = rows[np.concatenate([better, equal])]
    return chosen[np.lexsort((chosen, -scores[chosen]))]


def _candidates(scores: Scores, k: int) -> Rows:
    """Return about 2 * sqrt(n * k) positions, ascending, among which the k best of `scores` [n] are, k < n.

    Of the maxima of blocks, `least` is the k-th: k scores are at least as high. So the best are in blocks whose maximum
    is higher, or the first of those that tie with it; of these each has one, so k are enough.
    """
    size = math.isqrt(len(scores) // k)
    if size < MIN_BLOCK:
        return np.arange(len(scores))
    head = len(scores) - len(scores) % size
    maxima = scores[:head].reshape(-1, size).max(axis=1)
    least = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    higher = np.flatnonzero(~(maxima <= least))  # NaN is the highest, as in np.partition
    tied = np.flatnonzero(maxima == least)[:k]
    blocks = np.sort(np.concatenate([higher, tied]))
    rows = (blocks[:, None] * size + np.arange(size)).ravel()
    return np.concatenate([rows, np.arange(head, len(scores))])
