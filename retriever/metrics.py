"""Metrics of one service, in a separate registry, for `GET /metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROVIDER = {
    "requests": "Requests sent to the web search engine, counting each attempt.",
    "cost": "Cost of those requests, in the unit of `cost_per_request`.",
    "retries": "Retries of requests to the web search engine.",
    "answered": "Queries that the web search engine answered.",
    "failed": "Queries that the web search engine did not answer.",
    "replayed": "Queries answered from recordings.",
    "recorded": "Replies that were recorded.",
    "unrecorded": "Replies and pages that could not be written to disk.",
    "pages": "Pages fetched for the hits of the web search engine.",
    "pages_failed": "Pages that could not be fetched.",
}
"""Descriptions of a web search engine's totals (`retriever.backends.web.backend`)."""

# otherwise each series appears again with its time of creation
disable_created_metrics()  # type: ignore[no-untyped-call]


class _Provider(Collector):
    """Totals that are read when metrics are scraped."""

    def __init__(self, name: str, totals: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._totals = name, totals

    def collect(self) -> Iterable[CounterMetricFamily]:
        for what, value in self._totals().items():
            family = CounterMetricFamily(f"foray_retriever_provider_{what}", PROVIDER[what], labels=["provider"])
            family.add_metric([self._name], value)
            yield family


class Metrics:
    """Every name begins with `foray_retriever_`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foray_retriever_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"foray_retriever_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"foray_retriever_{name}", text, buckets=buckets, registry=registry)

        self.queries = counter("queries", "Queries in requests that were accepted.")
        self.blank = counter("blank_queries", "Queries without text, answered with no hits without a search.")
        self.cached = counter("cache_hits", "Queries answered from the cache.")
        self.shared = counter("deduplicated", "Queries that joined an equal one already waiting or being searched.")
        self.searched = counter("searched", "Queries that the backend answered.")
        self.calls = counter("index_calls", "Calls of the backend.")
        self.rejected = counter("rejected", "Requests refused because the queue was full.")
        self.waited = counter("waited", "Requests that waited for admission to the queue (overload: wait).")
        self.dropped = counter("dropped", "Queries dropped before the search because their clients had disconnected.")
        self.embedded = counter("embedded_texts", "Texts that /v1/embeddings turned into vectors.")
        self.search_seconds = histogram("search_seconds", "Seconds of one call of the backend.", _LATENCY_S)
        self.queue_seconds = histogram("queue_seconds", "Seconds from a query's arrival to its search.", _LATENCY_S)
        self.request_seconds = histogram("request_seconds", "Seconds to answer a search request.", _LATENCY_S)
        self.batch_size = histogram("batch_size", "Distinct queries in one call of the backend.", _SIZES)
        self.queue = gauge("queue", "Queries and texts waiting for the backend or in progress.")
        self.cache_bytes = gauge("cache_bytes", "Bytes of the answer cache.")
        self.passages = gauge("passages", "Passages in the index.")
        self._requests = counter(
            "requests", "Requests by route and status; 499: the client disconnected.", "route", "status"
        )
        self._odd = counter("rewritten_queries", "Queries rewritten to be searchable, by cause.", "cause")
        self._faults = counter("failed", "Queries without an answer, by cause.", "cause")
        # looking up a labelled series costs more than counting
        self._series: dict[tuple[str, int], Counter] = {}

    def request(self, route: str, status: int) -> None:
        """Count one answered request."""
        series = self._series.get((route, status))
        if series is None:
            series = self._series[route, status] = self._requests.labels(route, str(status))
        series.inc()

    def failed(self, cause: str) -> None:
        """Count one query without an answer."""
        self._faults.labels(cause).inc()

    def odd(self, causes: Mapping[str, int]) -> None:
        """Count queries that were cut or cleaned."""
        for cause, count in causes.items():
            self._odd.labels(cause).inc(count)

    def add_provider(self, name: str, totals: Callable[[], Mapping[str, float]]) -> None:
        """Export a web search engine's totals, which never decrease, as `foray_retriever_provider_NAME_total`."""
        self._registry.register(_Provider(name, totals))

    def families(self) -> Iterable[Metric]:
        """Return all metrics, including labels without a value yet."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Return the Prometheus text format."""
        return generate_latest(self._registry)
