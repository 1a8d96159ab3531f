"""Reciprocal-rank fusion of a new answer with those of earlier searches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from retriever.cache import Answer
from retriever.memory.entry import document_id

RRF_K = 60
"""The constant of Cormack, Clarke and Büttcher, Reciprocal Rank Fusion, SIGIR 2009."""


def fuse(new: Answer, earlier: Sequence[Answer], k: int, weight: float) -> Answer:
    """The k documents with the highest sums of w / (RRF_K + rank) over all lists; ranks count from 1.

    w is 1 for the new answer and `weight` for each earlier one. A document is known by its id (or, without one, by its
    bytes) and is sent as the first list that has it spells it. Ties go to the list that comes first, then to the rank.
    The scores of the result are those sums.
    """
    totals: dict[str | bytes, float] = {}
    documents: dict[str | bytes, bytes] = {}
    for number, answer in enumerate([new, *earlier]):
        for rank, document in enumerate(answer.documents, start=1):
            name = document_id(document) or document
            documents.setdefault(name, document)
            totals[name] = totals.get(name, 0.0) + (weight if number else 1.0) / (RRF_K + rank)
    # dicts keep the order of insertion and sorting is stable: that is the order of ties
    best = sorted(totals, key=lambda name: -totals[name])[:k]
    return Answer(tuple(documents[name] for name in best), tuple(totals[name] for name in best))
