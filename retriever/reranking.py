"""The reranker as a stage between the index and the answer. Belongs to the owner thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retriever.config_rerank import RerankSettings
from retriever.rerank.base import Reranker, order

Ranked = tuple[list[int], list[float]]
"""Rows of one query, best first, and their scores."""


class Reranking:
    """Made by `open_reranking`.

    candidates  hits of the index that are scored again; those behind them keep their order behind them
    identity    of what decides the scores
    """

    def __init__(self, reranker: Reranker, candidates: int, identity: dict[str, Any]) -> None:
        self._reranker, self.candidates, self.identity = reranker, candidates, identity

    def apply(self, queries: Sequence[str], ranked: Sequence[Ranked], text: Callable[[int], str]) -> list[Ranked]:
        """The hits of each query in their new order; `text` gives a row's contents.

        Scores are the reranker's, in one call for all queries. What was not scored again gets the lowest of them less
        its distance, so that scores fall with the rank throughout.
        """
        heads = [rows[: self.candidates] for rows, _ in ranked]
        asked = [(query, list(map(text, head))) for query, head in zip(queries, heads, strict=True)]
        results: list[Ranked] = []
        for head, (rows, _), scores in zip(heads, ranked, self._reranker.scores(asked), strict=True):
            places = order(scores)
            fresh = scores[places].tolist()
            rest = rows[len(head) :]
            behind = [fresh[-1] - distance for distance in range(1, len(rest) + 1)]
            results.append(([head[place] for place in places] + rest, fresh + behind))
        return results


def open_reranking(settings: RerankSettings) -> Reranking:
    """Load the model. To be called in the thread that will use it. UserError where it cannot be."""
    return Reranking(settings.build(), settings.candidates, settings.identity())
