"""Estimate the disk, memory, GPU memory and time of an index before it is built. Pure arithmetic on the settings.

There is one formula per index type, in STRUCTURES; tests compare them with built indexes. Seconds come from
rates measured on one core (RATES) or from a probe of the encoder on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retriever.index.config import TEMP_BYTES, IndexSettings

COLUMN_BYTES = 24
"""Bytes of offsets and ids per passage (`corpus.SCAN_FILES`)."""
PROCESS_BYTES = 120 << 20
"""Memory of a process with only its libraries (FAISS, bm25s, numpy); torch adds to it."""
TORCH_BYTES = 600 << 20
RATES = {"convert": 40_000, "scan": 100_000, "copy_bytes": 700e6}
"""Passages/s, and bytes/s of checksums and fsync. One quiet core of a Xeon (Sapphire Rapids), 100 words per passage;
about half of it was measured with other load on the machine."""
HNSW_MACS = 0.4e9
"""Multiply-adds/s of building a graph on one core, dominated by scattered reads (measured, 384 dimensions)."""
BLAS_MACS = 45e9
"""Multiply-adds/s of matrix products: k-means, and assigning passages to lists."""
PQ_MACS = 5e9
"""Multiply-adds/s of k-means and coding in the few dimensions of a vector's part."""
BM25_TOKENS = 1.2e6
"""Words/s of counting and sorting for BM25, one core."""
BM25_BUILD = 4.5
"""Peak memory of building BM25, relative to the size of its postings."""


@dataclass(frozen=True)
class CorpusStats:
    """Statistics of a corpus; means over passages.

    line_bytes  bytes of a line of the corpus     words, distinct  words of a passage, and distinct words among them
    converted   whether the corpus is copied into the index directory
    exact       whether `passages` was counted, not estimated
    """

    passages: int
    line_bytes: float = 660.0
    words: float = 105.0
    distinct: float = 75.0
    converted: bool = False
    exact: bool = False


@dataclass(frozen=True)
class ResourceEstimate:
    """Resources of a part: bytes, and seconds of one core.

    disk     in the finished directory        scratch    more on disk, only while building
    build    memory of the builder            serve      working set of serving: with less, it reads the disk
    gpu      memory of all GPUs together      seconds    by pass
    """

    disk: float = 0
    scratch: float = 0
    build: float = 0
    serve: float = 0
    gpu: float = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: ResourceEstimate) -> ResourceEstimate:
        """Add parts that are built one after the other and served together."""
        return ResourceEstimate(
            self.disk + other.disk,
            max(self.scratch, other.scratch),
            max(self.build, other.build),
            self.serve + other.serve,
            self.gpu + other.gpu,
            self.seconds | {name: self.seconds.get(name, 0) + s for name, s in other.seconds.items()},
        )


def _vectors(settings: Any, n: int, dim: int) -> float:
    return float(n * dim * (2 if settings.dtype == "float16" else 4))


def _flat(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    vectors = _vectors(settings, facts.passages, dim)
    return ResourceEstimate(disk=vectors, serve=vectors)


def _gpu(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    vectors = _vectors(settings, facts.passages, dim)
    held = facts.passages * dim * (2 if settings.precision == "float16" else 4)
    # serving reads only the candidates' stored vectors
    return ResourceEstimate(disk=vectors, gpu=held + max(1, len(settings.devices)) * TEMP_BYTES)


def _hnsw(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    """Levels are drawn geometrically: 2 m links on the lowest, m on each higher one, which 1 / m of the passages
    reach."""
    n, m = facts.passages, settings.m
    vectors = _vectors(settings, n, dim)
    if n < settings.exact_below:
        return _flat(settings, facts, dim)
    links = n * (4 * (2 * m + m / (m - 1)) + 12)  # 4 bytes per link, plus offset and level per passage
    # one distance per link of every visited candidate; about three quarters were seen before
    macs = n * dim * settings.ef_construction * math.log2(n) * 0.45
    return ResourceEstimate(
        disk=vectors + links,
        scratch=vectors,
        build=vectors + links + 48 * n + (512 << 20),
        serve=vectors + links,
        seconds={"index": macs / HNSW_MACS},
    )


def _lists(settings: Any, n: int) -> int:
    wanted: int = settings.nlist or 2 ** round(math.log2(4 * math.sqrt(n)))
    return max(1, min(wanted, n if settings.nlist else n // 39))


def _ivf_of(settings: Any, facts: CorpusStats, dim: int, code: float, training: int) -> ResourceEstimate:
    n, nlist = facts.passages, _lists(settings, facts.passages)
    vectors = _vectors(settings, n, dim)
    drawn = min(n, max(64 * nlist, training))
    file = n * (code + 8) + nlist * (4 * dim + 8)
    block = min(n * dim * 4, 512 << 20)
    macs = dim * nlist * (10.0 * drawn + n)  # ten rounds of k-means, then assigning every passage to a list
    return ResourceEstimate(
        disk=vectors + file,
        build=drawn * dim * 8 + 12 * n + 2 * block + nlist * dim * 4,
        serve=file + vectors,
        gpu=file + len(settings.devices) * TEMP_BYTES if settings.devices else 0,
        seconds={"index": macs / BLAS_MACS},
    )


def _ivf(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    if facts.passages < settings.exact_below:
        return _flat(settings, facts, dim)
    return _ivf_of(settings, facts, dim, _vectors(settings, 1, dim), 0)


def _ivfpq(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    codes = 2**settings.pq_bits
    if facts.passages < max(settings.exact_below, codes):
        return _flat(settings, facts, dim)
    parts = settings.pq_parts or next(p for p in range(max(1, dim // 8), 0, -1) if dim % p == 0)
    need = _ivf_of(settings, facts, dim, parts * settings.pq_bits / 8, 64 * codes)
    codebook = codes * dim * 4 + (dim * dim * 4 if settings.opq else 0)
    # the file is scanned; only candidates' vectors are read
    vectors = _vectors(settings, facts.passages, dim)
    coding = (facts.passages + 25 * 64 * codes) * dim * codes / PQ_MACS  # 25 rounds over 64 passages per code
    seconds = {"index": need.seconds["index"] + coding}
    return ResourceEstimate(need.disk + codebook, 0, need.build, need.serve - vectors + codebook, need.gpu, seconds)


def _bm25(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    distinct = facts.distinct * (0.6 if settings.stopwords == "english" else 1.0)
    postings = 8 * distinct * facts.passages  # a float32 score and an int32 passage
    vocabulary = _vocabulary(facts)
    return ResourceEstimate(
        disk=postings + 24 * vocabulary,
        build=BM25_BUILD * postings + 120 * vocabulary + 4 * facts.words * facts.passages,
        serve=postings + 120 * vocabulary + 12 * facts.passages,
        seconds={"texts": facts.words * facts.passages / BM25_TOKENS},
    )


def _vocabulary(facts: CorpusStats) -> float:
    """Return the number of distinct words, by Heaps' law with the constants of English Wikipedia: 44 * N ** 0.5."""
    return min(44 * math.sqrt(facts.words * facts.passages), facts.distinct * facts.passages)


def _hybrid(settings: Any, facts: CorpusStats, dim: int) -> ResourceEstimate:
    total = ResourceEstimate()
    for member in settings.members:
        total += structure(member, facts, dim)
    return total


STRUCTURES: dict[str, Callable[[Any, CorpusStats, int], ResourceEstimate]] = {
    "memory": _flat,
    "faiss_flat": _flat,
    "faiss_gpu": _gpu,
    "torch_flat": _gpu,
    "faiss_hnsw": _hnsw,
    "faiss_ivf": _ivf,
    "faiss_ivfpq": _ivfpq,
    "bm25": _bm25,
    "hybrid": _hybrid,
}


def structure(settings: IndexSettings, facts: CorpusStats, dim: int) -> ResourceEstimate:
    """Estimate the index alone, vectors included; with `file`, whose vectors exist already, only reading it."""
    file = getattr(settings, "file", None)
    if file is not None:
        size = file.stat().st_size if file.is_file() else 0
        return ResourceEstimate(serve=size, gpu=size if settings.type in ("faiss_gpu", "torch_flat") else 0)
    return STRUCTURES[settings.type](settings, facts, dim)


def dense_members(settings: Any) -> int:
    """Return the number of times that the corpus is encoded."""
    if settings.type == "hybrid":
        return sum(dense_members(member) for member in settings.members)
    return int(hasattr(settings, "encoder") and getattr(settings, "file", None) is None)


def estimate(
    settings: IndexSettings, facts: CorpusStats, dim: int, encode_rate: float | None, model_bytes: int
) -> ResourceEstimate:
    """Estimate conversion, scan, encoding, structure and checksums. `encode_rate`: passages/s, None: unknown."""
    n = facts.passages
    need = structure(settings, facts, dim)
    corpus = facts.line_bytes * n if facts.converted else 0.0
    columns = COLUMN_BYTES * n
    seconds = {"convert": n / RATES["convert"]} if facts.converted else {}
    seconds["scan"] = n / RATES["scan"]
    if encode_rate and dense_members(settings):
        seconds["vectors"] = dense_members(settings) * n / encode_rate
    seconds |= need.seconds
    seconds["checksums"] = (need.disk + columns) / RATES["copy_bytes"]
    base = PROCESS_BYTES + (TORCH_BYTES + model_bytes if model_bytes else 0)
    return ResourceEstimate(
        disk=corpus + columns + need.disk,
        scratch=max(need.scratch, 8.0 * n),
        build=base + max(need.build, 64 << 20),
        serve=base + need.serve + columns,
        gpu=need.gpu,
        seconds=seconds,
    )
