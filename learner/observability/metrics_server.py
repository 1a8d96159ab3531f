"""The learner's `GET /metrics`, in its own thread. On loopback, or with a token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from aiohttp import web

from learner.observability.metric_table import LEARNER, WAITS
from protocol.messages import MetricsSnapshot
from protocol.runtime.http.auth import read_access
from protocol.runtime.http.server import SERVER_OPTIONS, ThreadedServer, auth_middleware, listening
from protocol.runtime.metrics import Histogram, MetricsPage, row_of


def serve_prometheus(host: str, port: int, text: Callable[[], bytes]) -> ThreadedServer:
    """Serve `/metrics` with `text()` in a daemon thread; port 0: a free port.

    Raises UserError if the address is in use, or is not loopback and there is no token.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    access = read_access(os.environ)
    app = web.Application(middlewares=[auth_middleware(access, {}, default="viewer")], handler_args=SERVER_OPTIONS)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    serving = listening(
        app,
        host,
        port,
        access=access,
        setting="learner.metrics_host",
        todo="set learner.metrics_port",
        off="learner.metrics_port=null",
        shutdown_s=0.1,
    )
    return ThreadedServer(serving, "metrics")


def metrics_page(
    run: str, snapshot: Callable[[], MetricsSnapshot], histograms: Callable[[], Mapping[str, Histogram]] = dict
) -> MetricsPage:
    """Return the Prometheus page of a learner; every sample has the label `run`.

    Counters begin at 0 here. In the snapshot they continue from the checkpoint, so a crash lowers them to a value above
    0: Prometheus takes a decrease for a reset to 0, and its `increase()` would count that whole value again.
    """
    began = {name: n for name, n in snapshot().values.items() if row_of(LEARNER, name)[1].kind == "counter"}

    def since() -> MetricsSnapshot:
        now = snapshot()
        return now.model_copy(update={"values": {name: n - began.get(name, 0.0) for name, n in now.values.items()}})

    return MetricsPage("foray_learner_", LEARNER, since, histograms, {"run": run}, WAITS)
