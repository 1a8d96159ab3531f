"""The interface of rerankers, and the order by their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]


class Reranker(Protocol):
    """Scores documents for a query. One thread at a time."""

    def scores(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Scores]:
        """Return one float32 array [len(texts)] for every (query, texts), higher is better, all finite.

        Each query is paired only with its own texts (Search-R1's rerank server pairs it with those of all queries).
        """


def order(scores: Scores) -> npt.NDArray[np.int64]:
    """Return the original ranks [n] by (score descending, original rank ascending)."""
    return np.lexsort((np.arange(len(scores)), -scores))
