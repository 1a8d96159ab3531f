"""`foray bench retriever`: queries a second of the search service, and what a query costs it beside bare FAISS.

One index, one run. The real `python -m retriever` is asked by Foray's own client: by many clients that ask again when
they are answered, by a burst, and once more with batching off. Beside it a child searches the very same queries in
large batches with bare FAISS, encoding included, and nothing else: no HTTP, no JSON, no exact order of ties. The ratio
is processor seconds a query of that child over those of the service. Every answer of the service is compared with the
index's own. `--indexes` adds one table of all kinds of index on one corpus.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, field_validator

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from protocol.errors import ForayError

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

    def measure(self, say: Say) -> BenchResult:
        """Bare FAISS, the service, bare FAISS again, the service without batches; then the table."""
        from benchmarks.retriever.indexes import check_table, table_of
        from benchmarks.retriever.phases import Phases

        check_table(self)
        with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
            phases = Phases(self, Path(name), say)
            before = phases.bare([self.max_batch])
            loads = phases.service()
            steady = loads["service"]
            same = max(1, round(steady["mean_batch"]))
            after = phases.bare([self.max_batch, same], checked=True)
            loads["unbatched"] = single = phases.unbatched()
            check(loads)
            equal = phases.equal_answers()
            table = table_of(self, Path(name), say) if self.indexes else []
        bare = _bare(before[0], after[0])
        return BenchResult(
            value=steady["queries_per_s"],
            unit="queries/s",
            baseline={"name": f"bare FAISS in batches of {self.max_batch}, encoding included", **bare},
            ratio=bare["cpu_ms_per_query"] / steady["cpu_ms_per_query"],
            details={
                **loads,
                "bare_at_mean_batch": after[1],
                "index_batched": after[2],
                "cpu_over_bare": {
                    name: load["cpu_ms_per_query"] / bare["cpu_ms_per_query"] for name, load in loads.items()
                },
                "speed_of_bare": steady["queries_per_s"] / bare["queries_per_s"],
                "batching_gain_cpu": single["cpu_ms_per_query"] / steady["cpu_ms_per_query"],
                "batching_gain_speed": steady["queries_per_s"] / single["queries_per_s"],
                "answers_equal": equal,
                "ntotal": phases.ntotal,
                "indexes": table,
            },
        )


def check(loads: dict[str, dict[str, Any]]) -> None:
    """Raises ForayError unless every query was answered, and searched: a cached answer would be none of the index."""
    for name, phase in loads.items():
        lost = phase["queries"] - phase["answered"]
        if lost or phase["short"] or phase["searched"] != phase["queries"]:
            raise ForayError(
                f"{name}: {lost} of {phase['queries']} queries failed ({phase['errors']}), {phase['short']} answers "
                f"were short, {phase['searched']} queries were searched"
            )


def _bare(*runs: dict[str, Any]) -> dict[str, float]:
    """Means of two runs, one before and one after the service: what the machine had in between."""
    means = {name: fmean(run[name] for run in runs) for name in ("queries_per_s", "cpu_ms_per_query", "load_1m")}
    cpu = [run["cpu_ms_per_query"] for run in runs]
    return means | {"cpu_ms_apart": max(cpu) - min(cpu)}
