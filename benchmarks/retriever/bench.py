"""`foray bench retriever`: queries/s of the search service, and its CPU time per query against bare FAISS.

One index, one run. The real `python -m retriever` receives queries from Foray's client: from many clients that send the
next query after each answer, in a burst, and again with batching off. A child process searches the same queries in
large batches with bare FAISS, including encoding but without HTTP, JSON or exact order of ties. The ratio is CPU
seconds per query of that child over those of the service. Every answer of the service is compared with the index's.
`--indexes` adds a table of all index types on one corpus.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.base import BenchResult, Say
from benchmarks.retriever.settings import RetrieverBench
from protocol.errors import ForayError


def measure(bench: RetrieverBench, say: Say) -> BenchResult:
    """Measure bare FAISS, the service, bare FAISS again, the service without batches; then the table."""
    from benchmarks.retriever.indexes import check_table, table_of
    from benchmarks.retriever.phases import Phases

    check_table(bench)
    with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
        phases = Phases(bench, Path(name), say)
        before = phases.bare([bench.max_batch])
        loads = phases.service()
        steady = loads["service"]
        same = max(1, round(steady["mean_batch"]))
        after = phases.bare([bench.max_batch, same], checked=True)
        loads["unbatched"] = single = phases.unbatched()
        check(loads)
        equal = phases.equal_answers()
        table = table_of(bench, Path(name), say) if bench.indexes else []
    bare = _bare(before[0], after[0])
    return BenchResult(
        value=steady["queries_per_s"],
        unit="queries/s",
        baseline={"name": f"bare FAISS in batches of {bench.max_batch}, encoding included", **bare},
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
    """Raise ForayError unless every query was answered by a search, not from the cache."""
    for name, phase in loads.items():
        lost = phase["queries"] - phase["answered"]
        if lost or phase["short"] or phase["searched"] != phase["queries"]:
            raise ForayError(
                f"{name}: {lost} of {phase['queries']} queries failed ({phase['errors']}), {phase['short']} answers "
                f"were short, {phase['searched']} queries were searched"
            )


def _bare(*runs: dict[str, Any]) -> dict[str, float]:
    """Return means of two runs, one before and one after the service."""
    means = {name: fmean(run[name] for run in runs) for name in ("queries_per_s", "cpu_ms_per_query", "load_1m")}
    cpu = [run["cpu_ms_per_query"] for run in runs]
    return means | {"cpu_ms_apart": max(cpu) - min(cpu)}
