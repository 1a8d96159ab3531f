"""Composition root: socket first (so `/health` answers while a large index loads), then the index, then traffic.

SIGTERM --> draining: /ready says 503, requests in flight are answered, the batcher ends, exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.runtime.http.auth import read_access
from protocol.runtime.http.server import announce, listening
from protocol.runtime.lifecycle import shutdown_on_signals
from retriever.api.app import create_app
from retriever.api.base import Embedding, Service, Text
from retriever.backends.base import Embedder, Fault
from retriever.backends.factory import Opened, open_backend
from retriever.config import RetrieverSettings
from retriever.serving.admission import Room
from retriever.serving.batcher import Batcher
from retriever.serving.cache import AnswerCache
from retriever.serving.service import Searches

# An open backend put behind the handlers: the searches' queue, the embeddings' queue, and the one bound on both.

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


log = logging.getLogger("retriever")

SHUTDOWN_S = 5.0
"""Longest wait for requests in flight at the end."""


async def serve(settings: RetrieverSettings, *, port_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. UserError when the port is taken or the index cannot be served.

    The log line `listening on http://HOST:PORT` and the port file come when requests are answered, not before.
    """
    _allow_many_connections()
    with shutdown_on_signals() as shutdown:
        async with running(settings) as port:
            announce(log, settings.host, port, port_file)
            await shutdown.requested.wait()


@asynccontextmanager
async def running(settings: RetrieverSettings) -> AsyncIterator[int]:
    """A service that answers on the yielded port while the block runs."""
    access = read_access(os.environ)
    service = Service(settings)
    async with listening(
        create_app(service, access),
        settings.host,
        settings.port,
        access=access,
        setting="retriever.host",
        todo="choose another retriever.port (0 takes a free one) or retriever.host",
        shutdown_s=SHUTDOWN_S,
    ) as listener:
        opened = await open_backend(settings, service.metrics)
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(run, name=name) for name, run in attach(service, opened).items()]
                log.info("backend %s is open", opened.backend.fingerprint)
                try:
                    yield listener.port
                finally:
                    service.draining = True
                    await listener.close()
                    for task in asking:
                        task.cancel()
        finally:
            await opened.backend.close()


def _allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: 1024 is less than one burst."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
