"""From settings to the backend that answers: which one, what is put before it, and how many calls it takes at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from retriever.backends.base import Backend, Embedder
from retriever.backends.index import open_index
from retriever.backends.memory.backend import open_memory
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics


@dataclass(frozen=True)
class Opened:
    """An open backend.

    embedder   its encoder, for `/v1/embeddings`, where it has one
    lanes      calls of `search` at once
    max_batch  most queries in one of them
    by_run     whether an answer depends on the run that asks
    num_passages  how many there are; None: nobody knows (an online engine)
    """

    backend: Backend
    embedder: Embedder | None
    lanes: int
    max_batch: int
    by_run: bool
    num_passages: int | None = None


async def open_backend(settings: RetrieverSettings, metrics: Metrics) -> Opened:
    """The backend of these settings. UserError for all that a person must mend."""
    opened = await _open_source(settings, metrics)
    if settings.memory is None:
        return opened
    try:
        memory = await open_memory(opened.backend, settings.memory, metrics)
    except BaseException:
        await opened.backend.close()
        raise
    return replace(opened, backend=memory, by_run=True)


async def _open_source(settings: RetrieverSettings, metrics: Metrics) -> Opened:
    if settings.online is not None:
        online = settings.online.build()
        metrics.add_provider(settings.online.type, online.counters)
        # twice as many as may be asked at once: some of them wait for pages, or for their turn
        return Opened(online, None, lanes=2 * settings.online.concurrency, max_batch=1, by_run=False)
    index = await open_index(settings)
    passages = index.searcher.num_passages
    metrics.passages.set(passages)
    embedder = index if index.searcher.embeds else None
    return Opened(index, embedder, lanes=1, max_batch=settings.max_batch, by_run=False, num_passages=passages)
