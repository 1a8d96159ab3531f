"""Several indexes over one corpus, fused by reciprocal ranks: score = sum over members of weight / (60 + rank).

Cormack, Clarke and Buettcher, Reciprocal rank fusion outperforms Condorcet and individual rank learning methods,
SIGIR 2009. Ranks start at 1, and hits with equal scores in a member share the best of their ranks, so that equal
passages get equal scores. A passage with score 0 in a lexical member has no word of the query and gets nothing from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retriever.encoder.base import Encoder
from retriever.index import open_index, write_index
from retriever.index.base import NO_ROW, Hits, Index, PassageSource, Rows, Scores, top_rows
from retriever.index.config import HybridSettings

RANK_CONSTANT = 60


def folder(directory: Path, position: int, kind: str) -> Path:
    """Return the folder of a member: `0-bm25`, `1-faiss_flat`, .."""
    return directory / f"{position}-{kind}"


class HybridIndex:
    """The opened members."""

    def __init__(self, settings: HybridSettings, directory: Path, *, threads: int) -> None:
        self._members: list[Index] = [
            open_index(member, folder(directory, position, member.type), threads=threads)
            for position, member in enumerate(settings.members)
        ]
        self._weights = settings.weights or (1.0,) * len(self._members)
        self._candidates = settings.candidates

    @staticmethod
    def build(settings: HybridSettings, source: PassageSource, directory: Path) -> None:
        """Build every member into its folder. An interrupted build resumes as far as its members can."""
        for position, member in enumerate(settings.members):
            place = folder(directory, position, member.type)
            place.mkdir(exist_ok=True)
            write_index(member, source, place)

    @property
    def ntotal(self) -> int:
        """Return the number of passages."""
        return self._members[0].ntotal

    @property
    def encoder(self) -> Encoder | None:
        """Return the encoder of the first dense member."""
        return next((member.encoder for member in self._members if member.encoder is not None), None)

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `base.Index`. Scores are sums of reciprocal ranks; passages found by no member are missing."""
        k = min(k, self.ntotal)
        found = [member.search(queries, max(k, self._candidates)) for member in self._members]
        fused = Hits(
            np.full((len(queries), k), NO_ROW, dtype=np.int64), np.full((len(queries), k), -np.inf, dtype=np.float32)
        )
        for i in range(len(queries)):
            rows, scores = self._fuse([(hits.rows[i], hits.scores[i]) for hits in found])
            best = top_rows(scores, min(k, len(rows)))
            fused.rows[i, : len(best)], fused.scores[i, : len(best)] = rows[best], scores[best]
        return fused

    def _fuse(self, found: list[tuple[Rows, Scores]]) -> tuple[Rows, Scores]:
        """Return the rows ascending, and their sums."""
        voted, votes = [], []
        for (rows, scores), member, weight in zip(found, self._members, self._weights, strict=True):
            real = rows != NO_ROW
            if member.encoder is None:
                real &= scores > 0
            voted.append(rows[real])
            votes.append(weight / (RANK_CONSTANT + _ranks(scores[real])))
        rows, places = np.unique(np.concatenate(voted), return_inverse=True)
        return rows, np.bincount(places, np.concatenate(votes), len(rows)).astype(np.float32)


def _ranks(scores: Scores) -> Rows:
    """Return the ranks of descending scores: 1 + the number of better ones."""
    return 1 + np.searchsorted(-scores, -scores, side="left")
