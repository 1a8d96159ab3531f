"""Lexical vectors without a model, the same on every machine.

Every word and every character n-gram of it is hashed (CRC-32) to one of `dim` coordinates and a sign ("hashing trick",
Weinberger et al. 2009, arXiv 0902.2206). A word and all its n-grams together have equal length, so that inflected
forms and misspellings still match; words of up to three letters count less, because most are function words, and
repetitions count by their square root. Synonyms do not match.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from retriever.encoder.base import Vectors
from retriever.encoder.config import HashedEncoderSettings

_WORD = re.compile(r"\w+")
_WORD_CACHE = 200_000
_SHORT, _SHORT_WEIGHT = 3, 0.3


class HashedEncoder:
    """See the module's docstring. A text without a word has the zero vector."""

    def __init__(self, settings: HashedEncoderSettings) -> None:
        self.dim, self.normalized = settings.dim, True
        self._ngram = settings.ngram
        self._features = lru_cache(_WORD_CACHE)(self._word_features)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dim], rows of length 1 (or 0 for a text without a word)."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in enumerate(texts):
            counts = Counter(_WORD.findall(text.lower()))
            if not counts:
                continue
            features = [self._features(word) for word in counts]
            places = np.concatenate([places for places, _ in features])
            weights = np.concatenate([w * n**0.5 for (_, w), n in zip(features, counts.values(), strict=True)])
            total = np.bincount(places, weights=weights, minlength=self.dim)
            norm = float(np.sqrt(np.square(total).sum()))
            if norm > 0:
                vectors[row] = total / norm
        return vectors

    encode_queries = encode_passages

    def _word_features(self, word: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return coordinates and signed weights of one word and its n-grams."""
        padded = f"#{word}#"
        grams = [padded[i : i + self._ngram] for i in range(len(padded) - self._ngram + 1)]
        hashes = np.array([zlib.crc32(item.encode()) for item in [f"w:{word}", *grams]], dtype=np.int64)
        weight = 1.0 if len(word) > _SHORT else _SHORT_WEIGHT
        weights = np.full(len(hashes), weight / max(len(grams), 1) ** 0.5)
        weights[0] = weight
        # the top bit gives the sign, independent of the coordinate
        return (hashes & 0x7FFFFFFF) % self.dim, np.where(hashes >> 31, -weights, weights)
