"""A per-run memory of earlier searches, as a backend in front of the real one.

    search(query, run) --> encoder --> nearest earlier searches of the run
            one at `reuse_above` or more, for k hits or more --> its result, without a search
            else the real backend; its result is stored --> fused with those of the `fuse` nearest --> result

The answer is a function of the history: the order in which answers were stored, which is the order of a batch's queries
and of the ends of batches. Queries of one batch do not affect each other. Failures and answers without documents are
never stored, and a failure remains a failure. Requests without a run bypass the memory. Exact repetitions of a query
rarely reach it: the service's cache answers them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.search import Passage
from retriever.backends.base import Backend, QueryFailure, QueryResult
from retriever.backends.memory.config import SearchMemorySettings
from retriever.backends.memory.journal import MemoryEntry, MemoryJournal, document_id
from retriever.backends.memory.store import MemoryLookup, SearchMemory, unit_rows
from retriever.encoder import build_encoder, encoder_identity
from retriever.encoder.base import Encoder
from retriever.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")
Vectors = npt.NDArray[np.float32]
RRF_K = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009)."""


class MemoryBackend:
    """See the module's docstring. The thread owns encoder, entries and files. Created by `open_memory`."""

    def __init__(
        self,
        inner: Backend,
        settings: SearchMemorySettings,
        encoder: Encoder,
        remembered: SearchMemory,
        thread: ThreadPoolExecutor,
        metrics: Metrics,
    ) -> None:
        self._inner, self._settings, self._metrics = inner, settings, metrics
        self._encoder, self._remembered, self._thread = encoder, remembered, thread
        decides = settings.model_dump(mode="json", include={"reuse_above", "fuse", "fuse_above", "fuse_weight"})
        self.fingerprint = _digest(inner.fingerprint, encoder_identity(settings.encoder), decides)
        """Return the hash of the real backend and of the memory's settings. The history is excluded: answers of a run
        are kept apart by the run's name."""

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[QueryResult | QueryFailure]:
        """See `Backend`."""
        if not run:
            return await self._inner.search(queries, k, run)
        try:
            vectors, recalls = await self._in_thread(lambda: self._recall(queries, k, run))
        except Exception:
            # a failing memory must not cost answers
            log.exception("searching %d queries without memory", len(queries))
            self._metrics.memory_errors.inc()
            return await self._inner.search(queries, k, run)
        unknown = [i for i, recall in enumerate(recalls) if recall.reuse is None]
        self._metrics.reused.inc(len(queries) - len(unknown))
        found = await self._inner.search([queries[i] for i in unknown], k, run) if unknown else []
        fresh = dict(zip(unknown, found, strict=True))
        await self._remember(
            run,
            [
                MemoryEntry(queries[i], k, vectors[i].copy(), outcome)
                for i, outcome in fresh.items()
                if not isinstance(outcome, QueryFailure) and outcome.documents
            ],
        )
        return [
            self._fused(fresh[i], recall, k) if recall.reuse is None else recall.reuse
            for i, recall in enumerate(recalls)
        ]

    async def _remember(self, run: str, entries: list[MemoryEntry]) -> None:
        try:
            if entries:
                await self._in_thread(lambda: self._remembered.remember(run, entries))
        except Exception:
            log.exception("could not store %d searches in the memory", len(entries))
            self._metrics.memory_errors.inc()

    def _recall(self, queries: Sequence[str], k: int, run: str) -> tuple[Vectors, list[MemoryLookup]]:
        vectors = unit_rows(self._encoder.encode_queries(queries))
        recalls = self._remembered.recall(run, vectors, k)
        self._metrics.recalled.inc(sum(recall.reuse is not None or bool(recall.near) for recall in recalls))
        return vectors, recalls

    def _fused(self, answer: QueryResult | QueryFailure, recall: MemoryLookup, k: int) -> QueryResult | QueryFailure:
        if isinstance(answer, QueryFailure) or not recall.near:
            return answer
        self._metrics.fused.inc()
        return fuse(answer, recall.near, k, self._settings.fuse_weight)

    async def find(self, passage_id: str) -> Passage | None:
        """See `Backend`. Also finds documents that only the memory still has (e.g. of an earlier process)."""
        passage = await self._inner.find(passage_id)
        return passage or await self._in_thread(lambda: self._remembered.find(passage_id))

    def info(self) -> dict[str, Any]:
        """See `Backend`."""
        memory = {
            "encoder": encoder_identity(self._settings.encoder),
            "reuse_above": self._settings.reuse_above,
            "fuse": self._settings.fuse,
            "runs": self._remembered.num_runs,
            "entries": self._remembered.num_entries,
        }
        return {**self._inner.info(), "fingerprint": self.fingerprint, "memory": memory}

    async def close(self) -> None:
        """See `Backend`."""
        await asyncio.to_thread(self._thread.shutdown)
        self._remembered.close()
        await self._inner.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def open_memory(inner: Backend, settings: SearchMemorySettings, metrics: Metrics) -> MemoryBackend:
    """Open a memory in front of `inner`, loading its directory. Raises UserError for an invalid setting."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory")

    def opened() -> tuple[Encoder, SearchMemory]:
        encoder = build_encoder(settings.encoder)
        journal = None
        if settings.directory is not None:
            fingerprint = _digest(inner.fingerprint, encoder_identity(settings.encoder))
            journal = MemoryJournal(settings.directory, fingerprint, encoder.dim)
        return encoder, SearchMemory(settings, encoder.dim, metrics, journal)

    try:
        encoder, remembered = await asyncio.get_running_loop().run_in_executor(thread, opened)
    except BaseException:
        thread.shutdown(wait=False)
        raise
    if remembered.num_entries:
        log.info("loaded %d searches of %d runs into the memory", remembered.num_entries, remembered.num_runs)
    return MemoryBackend(inner, settings, encoder, remembered, thread, metrics)


def fuse(new: QueryResult, earlier: Sequence[QueryResult], k: int, weight: float) -> QueryResult:
    """Return the reciprocal-rank fusion: the k documents with the highest sums of w / (RRF_K + rank); ranks count from
    1.

    w is 1 for the new answer and `weight` for each earlier one. A document is identified by its id (or its bytes
    without one) and is sent in the form of the first list that contains it. Ties are broken by the order of lists, then
    by rank. The scores of the result are those sums.
    """
    totals: dict[str | bytes, float] = {}
    documents: dict[str | bytes, bytes] = {}
    for number, answer in enumerate([new, *earlier]):
        for rank, document in enumerate(answer.documents, start=1):
            name = document_id(document) or document
            documents.setdefault(name, document)
            totals[name] = totals.get(name, 0.0) + (weight if number else 1.0) / (RRF_K + rank)
    # dicts keep the order of insertion and sorting is stable: this gives the order of ties
    best = sorted(totals, key=lambda name: -totals[name])[:k]
    return QueryResult(tuple(documents[name] for name in best), tuple(totals[name] for name in best))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
