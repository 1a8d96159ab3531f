"""Estimates against what is really built, and the refusal of what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from protocol.errors import UserError
from retriever.index.config import HybridSettings, IndexSettings
from retriever.indexing import plan as indexing_plan
from retriever.indexing.build import build_index
from retriever.indexing.estimate import STRUCTURES, CorpusStats, estimate
from retriever.indexing.input import CORPUS, CorpusInput, read_input, write_corpus
from retriever.indexing.plan import make_plan, plan_build, refuse_if_too_large, sample
from retriever.indexing.workdir import files_in

PASSAGES, DIM = 600, 32
HASHED = {"type": "hashed", "dim": DIM}
KINDS: dict[str, dict[str, Any]] = {
    "memory": {"dtype": "float16"},
    "faiss_flat": {},
    "faiss_gpu": {},  # built without a GPU
    "torch_flat": {"dtype": "float16"},
    "faiss_hnsw": {"exact_below": 0, "m": 8, "build_threads": 1},
    "faiss_ivf": {"exact_below": 0, "dtype": "float16"},
    "faiss_ivfpq": {"exact_below": 0, "nlist": 8, "pq_bits": 4},
    "bm25": {},
    "hybrid": {"members": [{"type": "bm25"}, {"type": "faiss_flat", "encoder": HASHED}]},
}


def settings_for(kind: str) -> IndexSettings:
    fields: dict[str, Any] = {"type": kind, **KINDS[kind]}
    if kind not in ("bm25", "hybrid"):
        fields["encoder"] = HASHED
    settings: IndexSettings = TypeAdapter(IndexSettings).validate_python(fields)
    return settings


@pytest.fixture(scope="module")
def synthetic() -> CorpusInput:
    return read_input(f"synthetic:{PASSAGES}")


@pytest.fixture(scope="module")
def facts(synthetic: CorpusInput) -> CorpusStats:
    return sample(synthetic)[0]


def test_there_is_a_formula_for_every_index() -> None:
    members = {model["properties"]["type"]["const"] for model in HybridSettings.model_json_schema()["$defs"].values()
               if "type" in model.get("properties", {}) and "file" in model["properties"]}  # fmt: skip
    assert members <= STRUCTURES.keys() == KINDS.keys()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("faiss_ivfpq", "hybrid") else pytest.mark.slow) for kind in KINDS]
)
def test_disk_is_estimated_within_a_fifth(
    kind: str, synthetic: CorpusInput, facts: CorpusStats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = settings_for(kind), tmp_path / "index"
    build_index(synthetic.spec, out, settings, progress=lambda line: None)
    real = sum((out / name).stat().st_size for name in files_in(out))
    assert estimate(settings, facts, DIM, None, 0).disk == pytest.approx(real, rel=0.2)
    # the corpus is the larger part: the structure itself must be right, too
    structure = real - (out / CORPUS).stat().st_size
    assert estimate(settings, facts, DIM, None, 0).disk - facts.line_bytes * PASSAGES == pytest.approx(
        structure, rel=0.2
    )


@pytest.mark.parametrize("shape", ["lines", "gzip"])
def test_a_large_corpus_is_judged_by_its_first_passages(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    path = tmp_path / "c.jsonl"
    write_corpus(read_input("synthetic:16000"), path, lambda share, passages: None)
    if shape == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    monkeypatch.setattr(indexing_plan, "SAMPLE", 3000)
    facts, texts = sample(read_input(path))
    assert len(texts) == 3000
    assert not facts.exact
    assert facts.converted == (shape == "gzip")
    assert facts.passages == pytest.approx(16000, rel=0.2)
    assert facts.words == pytest.approx(103, rel=0.05)


def test_a_plan_times_the_encoder_and_reports_resources(
    synthetic: CorpusInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing_plan, "PROBE_S", 0.05)
    plan = plan_build(synthetic, settings_for("faiss_flat"))
    assert plan.encode_rate is not None
    assert plan.need.seconds["vectors"] == pytest.approx(PASSAGES / plan.encode_rate)
    text = "\n".join(plan.lines())
    assert "faiss_flat over 600 passages" in text and "32 x float32" in text
    assert "was not timed" in "\n".join(make_plan(settings_for("faiss_flat"), plan.facts, DIM, None).lines())


def test_what_does_not_fit_is_refused_in_words(
    facts: CorpusStats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(settings_for("faiss_hnsw"), facts, DIM, 1000.0)
    refuse_if_too_large(plan, tmp_path / "deep" / "index")
    huge = make_plan(settings_for("faiss_flat"), CorpusStats(10**12), DIM, 1000.0)
    with pytest.raises(UserError, match="not enough disk") as caught:
        refuse_if_too_large(huge, tmp_path / "index")
    assert "GB" in caught.value.why and "--force" in caught.value.todo
    refuse_if_too_large(huge, tmp_path / "index", have=10**18)  # it is there already
    monkeypatch.setattr(indexing_plan, "memory_available", lambda: 1000)
    with pytest.raises(UserError, match="not enough memory to build faiss_hnsw"):
        refuse_if_too_large(plan, tmp_path / "index")


def test_the_plan_for_wikipedia_is_what_is_documented() -> None:
    """21 million passages of 768 dimensions: the exact bytes."""
    facts = CorpusStats(21_000_000, exact=True)
    vectors = 21_000_000 * 768 * 2
    flat = TypeAdapter(IndexSettings).validate_python({"type": "faiss_flat", "dtype": "float16"})
    assert make_plan(flat, facts, 768, None).need.disk == vectors + 24 * 21_000_000
    gpu = TypeAdapter(IndexSettings).validate_python({"type": "faiss_gpu", "dtype": "float16", "devices": [0, 1]})
    assert make_plan(gpu, facts, 768, None).need.gpu == vectors + 2 * 512 * 2**20
    pq = TypeAdapter(IndexSettings).validate_python({"type": "faiss_ivfpq", "dtype": "float16", "pq_parts": 96})
    assert make_plan(pq, facts, 768, None).need.disk - vectors < 3.1e9
