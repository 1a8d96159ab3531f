"""The learner's `GET /metrics`, in a thread beside the training. On loopback, or for whoever brings a token.

prometheus_client's own server listens on every interface and asks nobody who he is.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from learner.observability.metric_table import LEARNER, WAITS
from protocol.errors import UserError
from protocol.messages import MetricsSnapshot
from protocol.runtime.http.auth import Access, Asked, check_bind, decide, read_access
from protocol.runtime.metrics import Histogram, Page, row_of

CLIENT_S = 5.0
"""Longest silence of a client: a connection that says nothing holds a thread for no longer."""


POLL_S = 0.05
"""How soon `close` is noticed."""


def serve_prometheus(host: str, port: int, text: Callable[[], bytes]) -> Endpoint:
    """Answers `/metrics` with `text()` from then on, in a daemon thread; on a free port for 0.

    Raises UserError when the address is taken, or beyond loopback without a token.
    """
    access = read_access(os.environ)
    check_bind(host, access, "learner.metrics_host", off="learner.metrics_port=null")
    handler = _handler(access, text)
    try:
        server = _Server((host, port), handler)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics on {host}:{port}", why=error.strerror or str(error), todo="set learner.metrics_port"
        ) from None
    threading.Thread(target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True).start()
    return Endpoint(server, host)


def page_of(
    run: str, snapshot: Callable[[], MetricsSnapshot], histograms: Callable[[], Mapping[str, Histogram]] = dict
) -> Page:
    """What Prometheus is shown of a learner from now on; every sample has the label `run`.

    Counters begin at 0 here. In the snapshot they go on from the checkpoint, so a crash makes them fall to a value
    above 0: Prometheus takes a fall for a new start from 0, and its `increase()` would count that whole value again.
    """
    began = {name: n for name, n in snapshot().values.items() if row_of(LEARNER, name)[1].kind == "counter"}

    def since() -> MetricsSnapshot:
        now = snapshot()
        return now.model_copy(update={"values": {name: n - began.get(name, 0.0) for name, n in now.values.items()}})

    return Page("foray_learner_", LEARNER, since, histograms, {"run": run}, WAITS)


class Endpoint:
    """A listener that answers."""

    def __init__(self, server: _Server, host: str) -> None:
        self._server = server
        self.port = int(server.server_address[1])
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.port}/metrics"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is nobody's fault; the standard server would print a traceback."""


def _handler(access: Access, text: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            verdict = decide(Asked(path, self.headers), needs="viewer", access=access)
            if verdict.status:
                return self._answer(verdict.status, verdict.message.encode())
            if path == "/health":
                return self._answer(200, b"ok")
            return self._answer(200, text()) if path == "/metrics" else self._answer(404, b"there is only /metrics")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A line for every scrape would bury the run's own."""

    return Handler
