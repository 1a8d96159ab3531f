"""Search without a service: the queries of the benchmark in batches, in a single thread.

    python -m benchmarks.retriever.raw SPEC.json

`bare` is FAISS alone: encode a batch, then `faiss.knn` over the index vectors for the k best. It is the baseline,
without the additional work of the service's search (more candidates, rescoring, exact order). `index` is that search,
in the same thread; its answers are the reference.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retriever.config import RetrieverSettings
from retriever.index import open_index

WARM_UP = 32
BLAS_FROM = 4
"""For batches below about 128, FAISS by default scans vector by vector: use the faster path for the baseline."""


@dataclass(frozen=True)
class Raw:
    """The specification of a search.

    settings  settings of the compared service: index, corpus, threads
    queries   file with a JSON list; the first `count` are searched
    batches   batch sizes of bare FAISS, one pass over the queries each
    answers   file for the ids that `index` found, "" for none
    """

    settings: dict[str, Any]
    queries: str
    count: int
    topk: int
    batches: list[int]
    answers: str = ""

    def write(self, path: Path) -> Path:
        """Write the specification for the child process."""
        path.write_text(json.dumps(asdict(self)))
        return path


def passes(raw: Raw) -> list[dict[str, Any]]:
    """Return the figures of every pass, `index` last."""
    import faiss

    from retriever.corpus.corpus import Corpus
    from retriever.index import store

    settings = RetrieverSettings.model_validate(raw.settings)
    queries = json.loads(Path(raw.queries).read_text())[: raw.count]
    index = open_index(settings.index, settings.index_path, threads=settings.threads)
    assert index.encoder is not None, "the comparison with FAISS needs an index of vectors"
    encoder, vectors = index.encoder, store.open_vectors(settings.index_path)
    faiss.omp_set_num_threads(settings.threads)
    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM

    def bare(batch: Sequence[str]) -> None:
        faiss.knn(encoder.encode_queries(batch), vectors, raw.topk, metric=faiss.METRIC_INNER_PRODUCT)

    found: list[list[int]] = []
    bare(queries[:WARM_UP])
    figures = [_pass("bare", bare, queries, size) for size in raw.batches]
    if raw.answers:
        figures.append(
            _pass("index", lambda b: found.extend(index.search(b, raw.topk).rows.tolist()), queries, raw.batches[0])
        )
        corpus = Corpus(settings.corpus, settings.index_path)
        Path(raw.answers).write_text(json.dumps([[corpus.passage(row).id for row in rows] for rows in found]))
    return figures


def _pass(kind: str, search: Callable[[Sequence[str]], None], queries: Sequence[str], size: int) -> dict[str, Any]:
    begun, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(queries), size):
        search(queries[start : start + size])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "kind": kind,
        "batch": size,
        "queries": len(queries),
        "queries_per_s": len(queries) / seconds,
        "cpu_ms_per_query": 1000 * cpu / len(queries),
        "load_1m": os.getloadavg()[0],
    }


if __name__ == "__main__":
    print(json.dumps(passes(Raw(**json.loads(Path(sys.argv[1]).read_text())))))
