"""What a reranker promises, and the order that its scores make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]


class Reranker(Protocol):
    """Scores of documents for a query. One thread at a time."""

    def scores(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Scores]:
        """Return one float32 array [len(texts)] for every (query, texts), higher is better, all finite.

        A query meets its own texts only (Search-R1's rerank server pairs every query with the documents of all).
        """


def order(scores: Scores) -> npt.NDArray[np.int64]:
    """Return the original ranks [n] by (score descending, original rank ascending)."""
    return np.lexsort((np.arange(len(scores)), -scores))
