"""Composition root: socket first (so `/health` answers while a large index loads), then the index, then traffic.

SIGTERM --> draining: /ready returns 503, requests in flight are answered, the batcher ends, exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot, NodeState
from protocol.runtime.http.auth import LOOPBACK, read_access
from protocol.runtime.http.server import announce, listening, reachable_url, service_host
from protocol.runtime.lifecycle import shutdown_on_signals, unwrap_user_error
from protocol.runtime.metrics import WaitTimer
from protocol.runtime.redis import processes
from protocol.runtime.redis.aio import Backoff, RedisClient, retry_until_available
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from retriever.api.app import create_app
from retriever.api.base import EmbeddingInput, EmbeddingService, RetrieverState
from retriever.backends.base import Embedder, QueryFailure
from retriever.backends.factory import OpenBackend, open_backend
from retriever.config import RetrieverSettings
from retriever.serving.admission import QueueLimit
from retriever.serving.batcher import DynamicBatcher
from retriever.serving.service import QueryService, ResultCache

log = logging.getLogger("retriever")


Vector = npt.NDArray[np.float32]

SHUTDOWN_S = 5.0
"""Timeout for requests in flight at shutdown, in seconds."""


async def serve(settings: RetrieverSettings, run: RunSettings | None = None, *, port_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError if the port is in use or the index cannot be served.

    The log line `listening on http://HOST:PORT` and the port file appear once requests are answered.

    run  register in its Redis, for the run's rollout servers; None: in no Redis
    """
    url = run.redis_url if run is not None else ""
    host = service_host(settings.host, url, read_access(os.environ), "retriever.host")
    settings = settings.model_copy(update={"host": host})
    with shutdown_on_signals() as shutdown, unwrap_user_error():
        async with running(settings) as port:
            announce(log, host, port, port_file)
            if run is None:
                await shutdown.requested.wait()
                return
            async with registered(run, settings.id, reachable_url(host, port, url)):
                await shutdown.requested.wait()


@asynccontextmanager
async def registered(run: RunSettings, own_id: str, url: str) -> AsyncIterator[None]:
    """Keep the service at `url` registered in the run's Redis while the block runs. Waits for a Redis that is away."""
    began, incarnation = time.monotonic(), secrets.token_hex(4)
    name = own_id or f"{socket.gethostname()}-{os.getpid()}"
    text = {"url": url, "state": str(NodeState.READY), "incarnation": incarnation}
    redis, waits = RedisClient(run.redis_url, Keys(run.id)), WaitTimer()

    def snapshot() -> MetricsSnapshot:
        up = time.monotonic() - began
        return MetricsSnapshot(process="retriever", id=name, uptime_s=up, waits=waits.seconds(), text=text)

    async def renew() -> None:
        backoff = Backoff("registering", waits)
        while True:
            await retry_until_available(backoff, lambda: processes.write(redis, snapshot()))
            await asyncio.sleep(processes.PERIOD_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renew(), name="registration")
            yield
            renewing.cancel()
        try:
            async with asyncio.timeout(3.0):
                await processes.remove(redis, "retriever", name)
        except (RedisUnavailable, TimeoutError) as error:
            log.info("could not deregister, the registration will expire: %s", error)
    finally:
        await redis.aclose()


@asynccontextmanager
async def running(settings: RetrieverSettings) -> AsyncIterator[int]:
    """Run the service on the yielded port inside the context."""
    access = read_access(os.environ)
    service = RetrieverState(settings)
    async with listening(
        create_app(service, access),
        settings.host or LOOPBACK,
        settings.port,
        access=access,
        setting="retriever.host",
        todo="set another retriever.port (0: a free one) or retriever.host",
        shutdown_s=SHUTDOWN_S,
    ) as listener:
        opened = await open_backend(settings, service.metrics)
        try:
            loops = attach(service, opened)
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(run, name=name) for name, run in loops.items()]
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


def attach(service: RetrieverState, opened: OpenBackend) -> dict[str, Coroutine[Any, Any, None]]:
    """Make the service ready. Return the loops to run, by name.

    Searches and embeddings have separate queues under one limit.
    """
    settings, metrics = service.settings, service.metrics
    tokenizer = _tokenizer(settings.token_ids)
    queue_limit = QueueLimit(
        settings.queue_limit,
        metrics,
        max_concurrent_batches=opened.max_concurrent_batches,
        max_wait_s=settings.overload_wait_s if settings.overload == "wait" else 0.0,
    )
    service.backend, service.num_passages = opened.backend, opened.num_passages
    searches = service.searches = QueryService(
        opened.backend,
        window_s=settings.window_ms / 1000,
        max_batch=opened.max_batch,
        max_concurrent_batches=opened.max_concurrent_batches,
        cache=ResultCache(int(settings.cache_mb * 2**20)),
        queue_limit=queue_limit,
        metrics=metrics,
    )
    loops = {"searches": searches.run()}
    if opened.embedder is not None:
        texts = _embedding_batcher(opened.embedder, service, queue_limit)
        service.embedding = EmbeddingService(opened.embedder.model, texts, tokenizer)
        loops["embeddings"] = texts.run()
    return loops


def _tokenizer(path: Path | None) -> Any:
    """Return the tokenizer in `path`, None without one. Raises UserError if it cannot be read."""
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        todo = "set retriever.token_ids to a tokenizer.json (pip install tokenizers)"
        raise UserError(f"cannot read the tokenizer {path}", why=str(error), todo=todo) from None


def _embedding_batcher(
    embedder: Embedder, service: RetrieverState, queue_limit: QueueLimit
) -> DynamicBatcher[EmbeddingInput, Vector]:
    async def embed(texts: Sequence[EmbeddingInput]) -> Sequence[Vector | QueryFailure]:
        vectors = await embedder.embed([item.text for item in texts], texts[0].kind)
        service.metrics.embedded.inc(len(vectors))
        return vectors

    return DynamicBatcher(
        embed,
        group=lambda item: item.kind,
        window_s=service.settings.window_ms / 1000,
        max_batch=service.settings.embed_batch,
        max_concurrent_batches=1,
        queue_limit=queue_limit,
        metrics=service.metrics,
    )
