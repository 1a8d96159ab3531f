"""BM25 over one world's passages, for the demonstrations: the ring's real retriever ranks the same way.

Scores are Lucene's BM25 (Robertson et al. 1995 with idf = ln(1 + (N - df + 0.5) / (df + 0.5))), k1 1.5, b 0.75, as in
bm25s. It is written out here because the warm start asks tens of thousands of single queries of worlds that live for
two steps: building a real index for each would cost more than the training.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from deploy.demo.world import World

Floats = npt.NDArray[np.float32]
K1, B = 1.5, 0.75
STOPWORDS = frozenset(("of", "and", "."))


class Lookup:
    """Ranked names of the passages for a query; remembers what it was asked."""

    def __init__(self, world: World) -> None:
        self.names = list(world.kind_of)
        self.fact_keys = list(world.facts)
        texts = [[w for w in f"{name} {world.text(name)}".split() if w not in STOPWORDS] for name in self.names]
        lengths = np.array([len(text) for text in texts], dtype=np.float32)
        norm = K1 * (1 - B + B * lengths / lengths.mean())
        counts: dict[str, Floats] = {}
        for number, text in enumerate(texts):
            for word, times in Counter(text).items():
                counts.setdefault(word, np.zeros(len(texts), dtype=np.float32))[number] = times
        self._weights: dict[str, Floats] = {}
        for word, count in counts.items():
            found = int((count > 0).sum())
            idf = math.log(1 + (len(texts) - found + 0.5) / (found + 0.5))
            self._weights[word] = (idf * count / (count + norm)).astype(np.float32)
        self._nothing = np.zeros(len(texts), dtype=np.float32)
        self._seen: dict[str, list[str]] = {}

    def top(self, query: str, topk: int) -> list[str]:
        """Names whose passages score highest, best first; those that share no word with the query never appear."""
        ranked = self._seen.get(query)
        if ranked is None:
            scores = sum((self._weights.get(word, self._nothing) for word in query.split()), start=self._nothing)
            best = np.argsort(-scores, kind="stable")[:8]
            ranked = self._seen[query] = [self.names[i] for i in best if scores[i] > 0]
        return ranked[:topk]
