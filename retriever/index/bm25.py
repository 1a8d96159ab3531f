"""BM25 with bm25s (Lù 2024, arXiv 2407.03618): scores are computed at indexing time and summed at query time.

Only its index is used. Terms are extracted here, identically for passages and queries, and `top_rows` selects hits,
because bm25s's top-k does not order ties and uses jax if that happens to be installed.

With `tokens: lucene`, stop words and stems, an index has the terms and the scores of Lucene's EnglishAnalyzer, as
pyserini and Anserini use it: words by the rules of Unicode's annex 29, without the possessive 's, and lengths rounded
as Lucene stores them in one byte. Not reproduced: the annex's rules for Thai, Lao, Khmer, Katakana beside Kanji and
emoji, the cut of words at 255 characters, and the exclusion of passages without a term.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import bm25s
import numpy as np
import numpy.typing as npt
from bm25s.stopwords import STOPWORDS_EN

from retriever.index.base import Hits, PassageSource, Scores, top_rows
from retriever.index.config import Bm25Settings
from retriever.index.porter import stem

logging.getLogger("bm25s").setLevel(logging.WARNING)

_WORD = re.compile(r"(?u)\b\w\w+\b")

_SINGLE = "\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Hiragana and Han: each character is a word."""
STOPWORDS_LUCENE = (
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
)  # fmt: skip
"""Stop words of Lucene's EnglishAnalyzer."""
_STOPWORDS = {"none": (), "english": STOPWORDS_EN, "lucene": STOPWORDS_LUCENE}
_EXACT = 24
"""Lengths up to this (and 15 more) are exact in Lucene's byte."""


@cache
def _lucene() -> re.Pattern[str]:
    """Return a pattern for the words of Lucene's StandardTokenizer, except as noted in the module's docstring."""
    by_category: dict[str, str] = {}
    for character in map(chr, range(0x80, 0x10000)):
        category = unicodedata.category(character)
        by_category[category] = by_category.get(category, "") + character
    # accents, vowel signs, joiners, direction marks: part of the preceding letter, though not \w in Python
    marks = "".join(by_category[category] for category in ("Mn", "Mc", "Cf"))
    letter = rf"[^\W{_SINGLE}{by_category['No']}]"  # ² is not a digit either
    run = rf"{letter}(?:{letter}|[{marks}])*"
    # within a word: a stop, colon or quote between letters, a stop, comma, semicolon or quote between digits
    link = rf"(?:(?<=[^\W\d_]|[{marks}])[.:'‘’·](?=[^\W\d_])|(?<=\d)[.,;'‘’](?=\d))"
    return re.compile(rf"[{_SINGLE}]|{run}(?:{link}{run})*")


class TextAnalyzer:
    """Maps a text to its terms, in order, with repetitions."""

    def __init__(self, settings: Bm25Settings) -> None:
        self._lucene = settings.tokens == "lucene"
        self._word = _lucene() if self._lucene else _WORD
        self._stop = frozenset(_STOPWORDS[settings.stopwords])
        self._stem = settings.stemming == "porter"

    def __call__(self, text: str) -> list[str]:
        """Return the terms of a passage or a query."""
        words = self._word.findall(text.lower())
        if self._lucene:
            words = [word[:-2] if word.endswith(("'s", "’s")) else word for word in words]
        if self._stop:
            words = [word for word in words if word not in self._stop]
        return [stem(word) for word in words] if self._stem else words


def lucene_length(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return lengths as Lucene decodes them from one byte (SmallFloat.intToByte4): four significant bits above 40."""
    rest = np.maximum(lengths - _EXACT, 0)
    _, exponent = np.frexp(rest.astype(np.float64))
    shift = np.maximum(exponent.astype(np.int64) - 4, 0)
    return np.where(lengths < _EXACT, lengths, _EXACT + ((rest >> shift) << shift))


def _use_lucene_lengths(model: bm25s.BM25, lengths: npt.NDArray[np.int64]) -> None:
    """Recompute every score with the length that Lucene decodes.

    A score is idf * tf / (tf + K) with K = k1 * (1 - b + b * length / mean): tf follows from it as an integer.
    """
    data, indptr = model.scores["data"], model.scores["indptr"]
    if not len(data):
        return  # a corpus without a term has no mean length
    holding = np.diff(indptr)
    idf = np.repeat(np.log(1 + (len(lengths) - holding + 0.5) / (holding + 0.5)), holding)
    mean = lengths.mean()
    exact, kept = (
        (model.k1 * (1 - model.b + model.b * each / mean))[model.scores["indices"]]
        for each in (lengths, lucene_length(lengths))
    )
    share = data / idf
    tf = np.rint(share * exact / (1 - share))
    model.scores["data"] = (idf * tf / (tf + kept)).astype(data.dtype)


class Bm25Index:
    """A saved index, memory-mapped; its vocabulary is in memory."""

    encoder = None

    def __init__(self, settings: Bm25Settings, directory: Path, *, threads: int = 1) -> None:
        """Open the index. threads: queries scored at a time, each with 4 bytes per passage; 0: one."""
        self._pool = ThreadPoolExecutor(threads, "bm25") if threads > 1 else None
        self._model = bm25s.BM25.load(directory, mmap=True, show_progress=False)
        for name in ("data", "indices", "indptr"):
            # plain views of the maps: numpy's memmap class makes every slice slower (by a sixth of a query's time)
            self._model.scores[name] = np.asarray(self._model.scores[name])
        self._vocabulary: dict[str, int] = self._model.vocab_dict
        self._terms = TextAnalyzer(settings)

    @staticmethod
    def build(settings: Bm25Settings, source: PassageSource, directory: Path) -> None:
        """Index the texts and save the result.

        Memory: 4 bytes per word of the corpus, and several times the index during sorting.
        """
        terms = TextAnalyzer(settings)
        vocabulary: dict[str, int] = {}
        rows = []
        for text in source.texts():
            ids = [vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)]
            rows.append(np.array(ids, dtype=np.int32))
        # a corpus without a single word must still give a well-formed index
        vocabulary = vocabulary or {"": 0}
        model = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy", csc_backend="numpy")
        with np.errstate(invalid="ignore"):  # the mean length is 0 if all passages are blank
            model.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        if settings.tokens == "lucene" and settings.k1 * settings.b:
            _use_lucene_lengths(model, np.array([len(row) for row in rows], dtype=np.int64))
        model.save(directory, show_progress=False)

    @property
    def ntotal(self) -> int:
        """Return the number of passages."""
        return int(self._model.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `base.Index`. Passages without a word of the query score 0 and come last, in corpus order."""
        k = min(k, self.ntotal)
        hits = Hits(np.empty((len(queries), k), dtype=np.int64), np.empty((len(queries), k), dtype=np.float32))

        def one(i: int) -> None:
            scores = self._score(queries[i])
            hits.rows[i] = top_rows(scores, k)
            hits.scores[i] = scores[hits.rows[i]]

        list((self._pool.map if self._pool else map)(one, range(len(queries))))
        return hits

    def _score(self, query: str) -> Scores:
        """Return float32 [ntotal]."""
        found = (self._vocabulary.get(term) for term in self._terms(query))
        scores: Scores = self._model.get_scores_from_ids([token for token in found if token is not None])
        return scores
