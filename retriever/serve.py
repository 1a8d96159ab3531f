"""Composition root: socket first (so `/health` answers while a large index loads), then the index, then traffic.

SIGTERM --> draining: /ready says 503, requests in flight are answered, the batcher ends, exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from protocol.access import check_bind, read_access
from protocol.errors import UserError
from retriever.app import create_app
from retriever.app_base import Service
from retriever.assembly import attach
from retriever.backend_open import open_backend
from retriever.config import RetrieverSettings

log = logging.getLogger("retriever")

BACKLOG = 4096
"""Connections that may knock at once: a lock-step trainer sends a whole batch of them in one burst."""

SHUTDOWN_S = 5.0
"""Longest wait for requests in flight at the end."""


async def serve(settings: RetrieverSettings, *, port_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT. UserError when the port is taken or the index cannot be served.

    The log line `listening on http://HOST:PORT` and the port file come when requests are answered, not before.
    """
    _allow_many_connections()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as port:
        log.info("listening on http://%s:%d", settings.host, port)
        if port_file is not None:
            _write_port(port_file, port)
        await stop.wait()
        log.info("stopping")


@asynccontextmanager
async def running(settings: RetrieverSettings) -> AsyncIterator[int]:
    """A service that answers on the yielded port while the block runs."""
    access = read_access(os.environ)
    check_bind(settings.host, access, "retriever.host")
    service = Service(settings)
    app = create_app(service, access)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        port = await _bind(runner, settings)
        opened = await open_backend(settings, service.metrics)
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(run, name=name) for name, run in attach(service, opened).items()]
                log.info("backend %s is open", opened.backend.fingerprint)
                try:
                    yield port
                finally:
                    service.draining = True
                    await runner.cleanup()
                    for task in asking:
                        task.cancel()
        finally:
            await opened.backend.close()
    finally:
        await runner.cleanup()


async def _bind(runner: web.AppRunner, settings: RetrieverSettings) -> int:
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
    except OSError as error:
        raise UserError(
            f"cannot listen on {settings.host}:{settings.port}",
            why=error.strerror or str(error),
            todo="choose another retriever.port (0 takes a free one) or retriever.host",
        ) from None
    return int(runner.addresses[0][1])


def _write_port(path: Path, port: int) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: 1024 is less than one burst."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
