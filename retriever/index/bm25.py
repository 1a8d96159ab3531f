"""BM25 by bm25s (Lù 2024, arXiv 2407.03618): scores are computed at indexing time and summed at query time.

Only its index is used. Words are found here, the same way for passages and queries (lower case, two or more word
characters, no stemming), and hits are picked by `top_rows`, because bm25s's own top-k leaves ties in any order and
takes jax where that happens to be installed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

from retriever.config_index import Bm25Settings
from retriever.index.base import Hits, Scores, Source, top_rows

logging.getLogger("bm25s").setLevel(logging.WARNING)

_WORD = re.compile(r"(?u)\b\w\w+\b")


def words(text: str) -> list[str]:
    """The words of a passage or a query, in order, repetitions kept."""
    return _WORD.findall(text.lower())


def _stopwords(settings: Bm25Settings) -> frozenset[str]:
    return frozenset(STOPWORDS_EN) if settings.stopwords == "english" else frozenset()


def build(settings: Bm25Settings, source: Source, directory: Path) -> None:
    """Index the texts and save. Memory: 4 bytes a word of the corpus, and several times the index while sorting it."""
    ignored = _stopwords(settings)
    vocabulary: dict[str, int] = {}
    rows = []
    for text in source.texts():
        ids = [vocabulary.setdefault(word, len(vocabulary)) for word in words(text) if word not in ignored]
        rows.append(np.array(ids, dtype=np.int32))
    # a corpus without a single word must still give a well-formed index
    vocabulary = vocabulary or {"": 0}
    model = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy", csc_backend="numpy")
    with np.errstate(invalid="ignore"):  # the mean length of blank passages alone is 0
        model.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    model.save(directory, show_progress=False)


class Bm25Index:
    """A saved index, memory-mapped; its vocabulary is in memory."""

    encoder = None

    def __init__(self, settings: Bm25Settings, directory: Path) -> None:
        self._model = bm25s.BM25.load(directory, mmap=True, show_progress=False)
        for name in ("data", "indices", "indptr"):
            # plain views of the maps: numpy's memmap class makes every slice dearer (a sixth of a query)
            self._model.scores[name] = np.asarray(self._model.scores[name])
        self._vocabulary: dict[str, int] = self._model.vocab_dict
        self._ignored = _stopwords(settings)

    @property
    def ntotal(self) -> int:
        """Number of passages."""
        return int(self._model.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `base.Index`. Passages that share no word with the query score 0 and come last, in corpus order."""
        k = min(k, self.ntotal)
        hits = Hits(np.empty((len(queries), k), dtype=np.int64), np.empty((len(queries), k), dtype=np.float32))
        for i, query in enumerate(queries):
            scores = self._score(query)
            hits.rows[i] = top_rows(scores, k)
            hits.scores[i] = scores[hits.rows[i]]
        return hits

    def _score(self, query: str) -> Scores:
        """float32 [ntotal]."""
        found = (self._vocabulary.get(word) for word in words(query) if word not in self._ignored)
        scores: Scores = self._model.get_scores_from_ids([token for token in found if token is not None])
        return scores
