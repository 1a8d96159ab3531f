"""The search service behind all dialects: queries to results, through cache and batcher.

handler --search()--> ResultCache --> DynamicBatcher (joins equal queries, bounds, batches) --> Backend.search
"""

from __future__ import annotations

import time
import unicodedata
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from retriever.backends.base import Backend, QueryFailure, QueryResult
from retriever.metrics import Metrics
from retriever.serving.admission import QueueLimit
from retriever.serving.batcher import DynamicBatcher

# Approximate overhead of CPython per result: key, tuples, floats, one bytes header a document.
_OVERHEAD_ENTRY, _OVERHEAD_HIT = 400, 90


EMPTY = QueryResult((), ())
"""The result of a blank query."""


def normalise(query: str) -> str:
    """Return the searched and cached form: Unicode NFC, white space collapsed to one blank and stripped."""
    return " ".join(unicodedata.normalize("NFC", query).split())


class QueryService:
    """Belongs to one event loop. Any number of tasks call `search`, one calls `run`."""

    def __init__(
        self,
        backend: Backend,
        *,
        window_s: float,
        max_batch: int,
        max_concurrent_batches: int,
        cache: ResultCache,
        queue_limit: QueueLimit,
        metrics: Metrics,
    ) -> None:
        self._backend, self.queue_limit = backend, queue_limit
        self._fingerprint = backend.fingerprint
        self._cache, self._metrics = cache, metrics
        self._batcher: DynamicBatcher[CacheKey, QueryResult] = DynamicBatcher(
            self._call,
            group=lambda key: key.k,
            window_s=window_s,
            max_batch=max_batch,
            max_concurrent_batches=max_concurrent_batches,
            queue_limit=queue_limit,
            metrics=metrics,
            on_result=self._store,
        )

    async def search(self, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
        """Return one outcome per query, in order; a blank query has no hits. Raises Overloaded or ServiceStopped."""
        keys = [CacheKey(normalise(query), k, self._fingerprint) for query in queries]
        known: dict[CacheKey, QueryResult | QueryFailure] = {}
        unknown: list[CacheKey] = []
        blank = 0
        for key in keys:
            if not key.query:
                blank += 1
                known[key] = EMPTY
            elif (result := self._cache.get(key)) is not None:
                known[key] = result
            else:
                unknown.append(key)
        metrics = self._metrics
        metrics.queries.inc(len(keys))
        if blank:
            metrics.blank.inc(blank)
        if cached := len(keys) - blank - len(unknown):
            metrics.cached.inc(cached)
        if unknown:
            known.update(await self._batcher.submit(unknown))
        return [known[key] for key in keys]

    async def run(self) -> None:
        """See DynamicBatcher.run."""
        await self._batcher.run()

    async def _call(self, keys: Sequence[CacheKey]) -> Sequence[QueryResult | QueryFailure]:
        # a single search for the largest k suffices only for exact indexes; approximate ones lack the prefix property
        start = time.perf_counter()
        outcomes = await self._backend.search([key.query for key in keys], keys[0].k)
        self._metrics.calls.inc()
        self._metrics.batch_size.observe(len(keys))
        self._metrics.search_seconds.observe(time.perf_counter() - start)
        return outcomes

    def _store(self, key: CacheKey, result: QueryResult) -> None:
        self._metrics.searched.inc()
        self._cache.put(key, result)
        self._metrics.cache_bytes.set(self._cache.num_bytes)


class CacheKey(NamedTuple):
    """What determines a result: the normalised query, the number of hits, the backend's fingerprint."""

    query: str
    k: int
    fingerprint: str


class ResultCache:
    """LRU map from CacheKey to QueryResult that holds at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._results: OrderedDict[CacheKey, QueryResult] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: CacheKey) -> QueryResult | None:
        """Return the result, which becomes the most recently used, or None."""
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: CacheKey, result: QueryResult) -> None:
        """Store a result and evict the oldest. Results larger than the whole cache are not stored."""
        size = _size(key, result)
        if size > self._max_bytes:
            return
        old = self._results.pop(key, None)
        self.num_bytes += size - (_size(key, old) if old is not None else 0)
        self._results[key] = result
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._results.popitem(last=False))


def _size(key: CacheKey, result: QueryResult) -> int:
    text = 4 * len(key.query) + sum(map(len, result.documents))
    return text + _OVERHEAD_ENTRY + _OVERHEAD_HIT * len(result.documents)
