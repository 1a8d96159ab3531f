"""Counters of one service, in a registry of their own, for `GET /metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """Every name begins with `foray_retriever_`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foray_retriever_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Requests to /retrieve by HTTP status; 499: the client went away", "status")
        self.queries = counter("queries", "Queries in requests that were accepted")
        self.blank = counter("blank_queries", "Queries without any text: answered with no hits, not searched")
        self.cached = counter("cache_hits", "Queries answered from the cache")
        self.shared = counter("deduplicated", "Queries that joined an equal one already waiting or being searched")
        self.searched = counter("searched", "Queries that reached the index")
        self.calls = counter("index_calls", "Calls of the index")
        self.rejected = counter("rejected", "Requests refused with 429 because the queue was full")
        self.dropped = counter("dropped", "Queries dropped before the search because nobody waited for them any more")
        self.failed = counter("failed", "Queries on which the index raised an error")
        self.request_seconds = Histogram(
            "foray_retriever_request_seconds", "Time to answer /retrieve", buckets=_LATENCY_S, registry=registry
        )
        self.search_seconds = Histogram(
            "foray_retriever_search_seconds", "Time of one index call", buckets=_LATENCY_S, registry=registry
        )
        self.batch_size = Histogram(
            "foray_retriever_batch_size", "Distinct queries in one index call", buckets=_SIZES, registry=registry
        )
        self.queue = Gauge("foray_retriever_queue", "Queries waiting or being searched", registry=registry)
        self.cache_bytes = Gauge("foray_retriever_cache_bytes", "Size of the answer cache", registry=registry)
        self.passages = Gauge("foray_retriever_passages", "Passages in the index", registry=registry)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
