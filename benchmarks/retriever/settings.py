"""Settings of `foray bench retriever`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from benchmarks.base import BenchSettings, Target

TYPES = ("memory", "faiss_flat", "faiss_hnsw", "faiss_ivf", "faiss_ivfpq", "bm25", "hybrid")


class RetrieverBench(BenchSettings):
    """The index, the load, and the table."""

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
        Target("ratio", 0.8, "processor time a query, bare FAISS over the service"),
    )
    runner: ClassVar[str] = "benchmarks.retriever.bench:measure"
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "retriever",
        "rollout_server/search",
        "benchmarks/retriever/*.py",
    )

    passages: int = Field(default=1_000_000, ge=100)
    """Passages of seeded synthetic text, when an index must be built first."""
    index_dir: str = ""
    """A built faiss_flat index to take instead."""
    clients: int = Field(default=512, ge=1)
    """Clients at once, each of which asks its next query when it has the answer to the last."""
    turns: int = Field(default=4, ge=1)
    """Queries of each client."""
    burst: int = Field(default=2560, ge=1)
    """Queries that are asked all at once after that, by Foray's client and by plain POSTs without one."""
    unbatched: int = Field(default=64, ge=1)
    """Queries to the service with batching off, from as many clients as before or fewer."""
    topk: int = Field(default=3, ge=1, le=100)
    """Hits a query."""
    max_batch: int = Field(default=512, ge=1)
    """retriever.max_batch, and the batches of bare FAISS."""
    window_ms: float = Field(default=5.0, ge=0)
    """retriever.window_ms."""
    threads: int = Field(default=1, ge=1)
    """Threads of FAISS, in the service and bare alike; leave a core to the clients."""
    connections: int = Field(default=0, ge=0)
    """Most requests that Foray's client has in flight; 0: what its settings say by themselves."""
    deadline_s: float = Field(default=300.0, gt=0)
    """The client's deadline for one query, retries included: on a slow machine the burst takes long, and must."""
    indexes: tuple[str, ...] = TYPES
    """Indexes in the table, with commas, settings behind colons: bm25,faiss_ivf:nprobe=128; empty: no table."""
    data: str = ""
    """Directory with corpus_multihop.jsonl and questions_*.jsonl for the table; empty: synthetic text."""
    table_passages: int = Field(default=20_000, ge=100)
    """Synthetic passages of the table where there is no `data`."""

    @field_validator("indexes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(name for name in value.split(",") if name) if isinstance(value, str) else value
