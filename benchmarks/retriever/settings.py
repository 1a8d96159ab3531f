"""Settings of `foray bench retriever`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from benchmarks.base import BenchSettings, Target

TYPES = ("memory", "faiss_flat", "faiss_hnsw", "faiss_ivf", "faiss_ivfpq", "bm25", "hybrid")


class RetrieverBench(BenchSettings):
    """Settings of `foray bench retriever`."""

    help: ClassVar[str] = (
        "the search service under load against bare FAISS in large batches, and a table of all indexes"
    )
    quick: ClassVar[dict[str, Any]] = {
        "passages": 3000,
        "clients": 64,
        "turns": 2,
        "burst": 128,
        "unbatched": 16,
        "indexes": ("memory", "faiss_flat", "bm25"),
        "table_passages": 1000,
    }
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 0.8, "processor time per query: bare FAISS, divided by the service"),
    )
    runner: ClassVar[str] = "benchmarks.retriever.bench:measure"
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "retriever",
        "rollout_server/search",
        "benchmarks/retriever/*.py",
    )

    passages: int = Field(default=1_000_000, ge=100)
    """Passages of generated text, if an index must be built first."""
    index_dir: str = ""
    """Directory of a built faiss_flat index to use instead."""
    clients: int = Field(default=512, ge=1)
    """Concurrent clients, each of which sends its next query after the previous answer."""
    turns: int = Field(default=4, ge=1)
    """Queries per client."""
    burst: int = Field(default=2560, ge=1)
    """Queries sent at the same time after that, with Foray's client and with plain POSTs."""
    unbatched: int = Field(default=64, ge=1)
    """Queries to the service with batching off, from at most as many clients."""
    topk: int = Field(default=3, ge=1, le=100)
    """Hits per query."""
    max_batch: int = Field(default=512, ge=1)
    """retriever.max_batch, and the batch size of bare FAISS."""
    window_ms: float = Field(default=5.0, ge=0)
    """retriever.window_ms."""
    threads: int = Field(default=1, ge=1)
    """FAISS threads, in the service and in bare FAISS; leave a core to the clients."""
    connections: int = Field(default=0, ge=0)
    """Maximum requests in flight of Foray's client; 0: the default of its settings."""
    deadline_s: float = Field(default=300.0, gt=0)
    """The client's deadline for one query, including retries: on a slow machine the burst takes long."""
    indexes: tuple[str, ...] = TYPES
    """Indexes in the table, comma-separated, settings after a colon: bm25,faiss_ivf:nprobe=128. Empty: no table."""
    data: str = ""
    """Directory with corpus_multihop.jsonl and questions_*.jsonl for the table. Empty: generated text."""
    table_passages: int = Field(default=20_000, ge=100)
    """Generated passages for the table without `data`."""

    @field_validator("indexes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(name for name in value.split(",") if name) if isinstance(value, str) else value
