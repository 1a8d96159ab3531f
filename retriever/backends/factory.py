"""Open the backend of the settings: an index or a web search engine."""

from __future__ import annotations

from dataclasses import dataclass

from retriever.backends.base import Backend, Embedder
from retriever.backends.index import open_index_backend
from retriever.backends.web.backend import open_web
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics


@dataclass(frozen=True)
class OpenBackend:
    """A backend that is ready for queries.

    embedder                its encoder, for `/v1/embeddings`, if it has one
    max_concurrent_batches  concurrent calls of `search`
    max_batch               maximum queries per call
    num_passages            size of the corpus; None: unknown (a web search engine)
    """

    backend: Backend
    embedder: Embedder | None
    max_concurrent_batches: int
    max_batch: int
    num_passages: int | None = None


async def open_backend(settings: RetrieverSettings, metrics: Metrics) -> OpenBackend:
    """Open the backend of these settings. Raises UserError if a setting, the corpus or the index is invalid."""
    if settings.online is not None:
        online = open_web(settings.online)
        metrics.add_provider(settings.online.type, online.counters)
        # twice the concurrency: some queries wait for pages or for the rate limit
        return OpenBackend(online, None, max_concurrent_batches=2 * settings.online.concurrency, max_batch=1)
    index = await open_index_backend(settings)
    passages = index.searcher.num_passages
    metrics.passages.set(passages)
    embedder = index if index.searcher.has_encoder else None
    return OpenBackend(index, embedder, max_concurrent_batches=1, max_batch=settings.max_batch, num_passages=passages)
