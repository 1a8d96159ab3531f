"""An open backend put behind the handlers: the searches' queue, the embeddings' queue, and the one bound on both."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retriever.app_base import Embedding, Service, Text
from retriever.backend import Embedder, Fault
from retriever.backend_open import Opened
from retriever.batcher import Batcher
from retriever.cache import AnswerCache
from retriever.room import Room
from retriever.searches import Searches

Vector = npt.NDArray[np.float32]


def attach(service: Service, opened: Opened) -> dict[str, Coroutine[Any, Any, None]]:
    """Make the service ready. Returns the loops that must run from now on, by name."""
    settings, metrics = service.settings, service.metrics
    patience_s = settings.overload_wait_s if settings.overload == "wait" else 0.0
    room = Room(settings.queue_limit, metrics, lanes=opened.lanes, patience_s=patience_s)
    service.backend, service.num_passages = opened.backend, opened.num_passages
    searches = service.searches = Searches(
        opened.backend,
        by_run=opened.by_run,
        window_s=settings.window_ms / 1000,
        max_batch=opened.max_batch,
        lanes=opened.lanes,
        cache=AnswerCache(int(settings.cache_mb * 2**20)),
        room=room,
        metrics=metrics,
    )
    loops = {"searches": searches.run()}
    if opened.embedder is not None:
        texts = _texts_before(opened.embedder, service, room)
        service.embedding = Embedding(opened.embedder.model, texts)
        loops["embeddings"] = texts.run()
    return loops


def _texts_before(embedder: Embedder, service: Service, room: Room) -> Batcher[Text, Vector]:
    async def embed(texts: Sequence[Text]) -> Sequence[Vector | Fault]:
        vectors = await embedder.embed([item.text for item in texts], texts[0].kind)
        service.metrics.embedded.inc(len(vectors))
        return vectors

    return Batcher(
        embed,
        group=lambda item: item.kind,
        window_s=service.settings.window_ms / 1000,
        max_batch=service.settings.embed_batch,
        lanes=1,
        room=room,
        metrics=service.metrics,
    )
