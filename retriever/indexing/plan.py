"""Plan a build: sample the corpus, time the encoder, and compare required with available resources."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.runtime.lifecycle import memory_available
from protocol.runtime.progress import amount, duration
from retriever.corpus.formats.synthetic import Synthetic
from retriever.encoder import build_encoder
from retriever.encoder.base import Encoder
from retriever.index.config import IndexSettings
from retriever.indexing.estimate import RATES, CorpusStats, ResourceEstimate, dense_members, estimate
from retriever.indexing.input import CorpusInput, as_line, documents

SAMPLE = 2000
"""Number of first passages that are sampled."""
PROBE_S, PROBE_CHUNK = 1.5, 64
"""Duration of timing the encoder, in seconds, and passages per call."""


@dataclass(frozen=True)
class BuildPlan:
    """Resources of a build. `encode_rate` passages/s; None: unknown, or nothing to encode."""

    facts: CorpusStats
    type: str
    dim: int
    dtype: str
    encode_rate: float | None
    need: ResourceEstimate

    def lines(self) -> list[str]:
        """Return the plan as text."""
        facts, need = self.facts, self.need
        about = "" if facts.exact else "about "
        shape = f", {self.dim} x {self.dtype}" if self.dim else ""
        out = [
            f"{self.type} over {about}{facts.passages:,} passages of {facts.words:.0f} words{shape}",
            f"  disk          {amount(need.disk)}, and {amount(need.scratch)} more while building",
            f"  memory        {amount(need.build)} to build, {amount(need.serve)} to serve without reading the disk",
        ]
        if need.gpu:
            out.append(f"  GPU memory    {amount(need.gpu)}")
        total = sum(need.seconds.values())
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in need.seconds.items() if seconds >= 1)
        out.append(f"  time          {duration(total)} on one core" + (f": {parts}" if parts else ""))
        if lacks_encode_rate(self):
            out.append("  (without encoding: the encoder was not timed; set --encode-rate PASSAGES_PER_SECOND)")
        return out

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as bytes and seconds."""
        return asdict(self) | {"seconds": sum(self.need.seconds.values())}


def lacks_encode_rate(plan: BuildPlan) -> bool:
    """Return whether there is something to encode at an unknown speed."""
    return plan.dim > 0 and plan.encode_rate is None


def plan_build(given: CorpusInput, index: IndexSettings, rate: float | None = None) -> BuildPlan:
    """Read the first passages and, unless its `rate` is given, time the encoder on them."""
    facts, texts = sample(given)
    if not dense_members(index):
        return make_plan(index, facts, 0, None)
    encoder = build_encoder(_dense(index).encoder)
    if rate is None and texts:
        rate = probe(encoder, texts)
    return make_plan(index, facts, encoder.dim, rate)


def make_plan(index: IndexSettings, facts: CorpusStats, dim: int, encode_rate: float | None) -> BuildPlan:
    """Return a plan without reading anything."""
    need = estimate(index, facts, dim, encode_rate, _model_bytes(index))
    first = _dense(index)
    dtype = "" if first is None else first.dtype
    return BuildPlan(facts, index.type, 0 if first is None else dim, dtype, encode_rate, need)


def _dense(index: Any) -> Any:
    """Return the first index with an encoder: itself, or a member."""
    members = [index, *getattr(index, "members", ())]
    return next((member for member in members if hasattr(member, "encoder")), None)


def dim_of(index: IndexSettings) -> int | None:
    """Return the dimension of the vectors if set; 0 without vectors; None: only the model knows."""
    dense = _dense(index)
    if dense is None:
        return 0
    found: int | None = getattr(dense.encoder, "dim", None)
    return found


def _model_bytes(index: IndexSettings) -> int:
    model = getattr(getattr(_dense(index), "encoder", None), "model", None)
    if not isinstance(model, Path):
        return 0
    return sum(file.stat().st_size for file in model.glob("*") if file.suffix in (".safetensors", ".bin"))


def sample(given: CorpusInput) -> tuple[CorpusStats, list[str]]:
    """Return the corpus statistics from its first passages, and their texts."""
    count, lines, words, distinct, share = 0, 0, 0, 0, 0.0
    at_share = 0
    texts: list[str] = []

    def tick(fraction: float, passages: int) -> None:
        nonlocal share, at_share
        if fraction > share:
            share, at_share = fraction, passages

    with closing(documents(given, tick)) as passages:
        for document in passages:
            count += 1
            lines += len(as_line(document))
            found = document.contents.lower().split()
            words, distinct = words + len(found), distinct + len(set(found))
            if len(texts) < SAMPLE:
                texts.append(document.contents)
            if count >= SAMPLE and share > 0:
                break
    exact = share >= 1.0
    total = count if exact else round(at_share / share) if share else count
    if given.format == "synthetic" and not given.words:
        total, exact = Synthetic.parse(given.spec).passages, True
    line = given.size / max(total, 1) if given.in_place and not exact else lines / max(count, 1)
    n = max(count, 1)
    return CorpusStats(total, line, words / n, distinct / n, not given.in_place, exact), texts


def probe(encoder: Encoder, texts: Sequence[str]) -> float:
    """Return passages/s of the encoder, over a second or two; the first chunk warms it up."""
    encoder.encode_passages(texts[:PROBE_CHUNK])
    done, start = 0, time.monotonic()
    while (spent := time.monotonic() - start) < PROBE_S:
        chunk = [texts[(done + i) % len(texts)] for i in range(PROBE_CHUNK)]
        encoder.encode_passages(chunk)
        done += len(chunk)
    return done / spent


def refuse_if_too_large(plan: BuildPlan, out: Path, *, have: int = 0) -> None:
    """Raise UserError unless disk and memory are enough. `have`: bytes of an interrupted build already on disk."""
    place = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free + have
    wanted = plan.need.disk + plan.need.scratch
    if wanted > free:
        raise UserError(
            f"not enough disk space for the index {out}",
            why=f"the build needs {amount(wanted)}, but {amount(free)} are free",
            todo="free disk space, set another --out, use dtype=float16 or faiss_ivfpq, or add --force to build anyway",
        )
    memory = memory_available()
    if memory is not None and plan.need.build > memory:
        raise UserError(
            f"not enough memory to build {plan.type}",
            why=f"the build needs {amount(plan.need.build)}, but {amount(memory)} are available",
            todo="build on a larger machine, use another --index (faiss_flat and faiss_ivfpq need little), or add "
            "--force to build anyway",
        )


def constants() -> dict[str, float]:
    """Return the constants behind the plan's seconds."""
    from retriever.indexing import estimate as formulas

    return RATES | {
        "hnsw_macs": formulas.HNSW_MACS,
        "blas_macs": formulas.BLAS_MACS,
        "pq_macs": formulas.PQ_MACS,
        "bm25_tokens": formulas.BM25_TOKENS,
    }
