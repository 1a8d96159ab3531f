"""The learner's `GET /metrics`, in a thread beside the training. On loopback, or for whoever brings a token.

prometheus_client's own server listens on every interface and asks nobody who he is.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from protocol.access import Access, check_bind, read_access
from protocol.errors import UserError
from protocol.http_rules import Asked, decide
from protocol.messages import MetricsSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CLIENT_S = 5.0
"""Longest silence of a client: a connection that says nothing holds a thread for no longer."""


def serve_prometheus(host: str, port: int, snapshot: Callable[[], MetricsSnapshot]) -> int:
    """Answers `/metrics` from then on, in a daemon thread; the port (a free one for 0).

    Raises UserError when the address is taken, or beyond loopback without a token.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    access = read_access(os.environ)
    check_bind(host, access, "learner.metrics_host")
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    handler = _handler(access, lambda: generate_latest(registry))
    try:
        server = _Server((host, port), handler)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics on {host}:{port}", why=error.strerror or str(error), todo="set learner.metrics_port"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])


class _Collector:
    def __init__(self, snapshot: Callable[[], MetricsSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._snapshot()
        for name, value in now.values.items():
            yield GaugeMetricFamily(f"foray_learner_{name}", name.replace("_", " "), value=value)
        waits = CounterMetricFamily("foray_learner_seconds", "Seconds by cause", labels=["cause"])
        for cause, seconds in now.waits.items():
            waits.add_metric([cause], seconds)
        yield waits


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
