"""The numbers of docs/plan.md and docs/reproduce-search-r1.md are those that the code computes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages.hardware import SHAPES, on_profile
from deploy.doctor.machine import SPARE_DISK
from deploy.hardware.host_memory import memory_needed, memory_parts
from deploy.hardware.inventory import gib
from deploy.hardware.shape import ModelShape, read_shape
from foray.evaluation.published import ROWS
from learner.config.learner import KEEP_VERSIONS
from retriever.indexing.cli import index_settings
from retriever.indexing.estimate import CorpusStats
from retriever.indexing.plan import make_plan

DOCS = Path(__file__).parents[2] / "docs"
PLAN = (DOCS / "plan.md").read_text()
REPRODUCE = (DOCS / "reproduce-search-r1.md").read_text()
RATE = 284e12
STEPS, TRAJECTORIES, RANKS, GPUS = 1005, 2560, 4, 8


def shape(model: str) -> ModelShape:
    found = read_shape(SHAPES[model])
    assert found is not None
    return found


def step_s(model: str, tokens: int) -> float:
    return TRAJECTORIES * tokens * 2 * shape(model).parameters * 6 / (RANKS * RATE)


def test_the_rate_is_the_one_that_was_seen() -> None:
    assert f"{RATE / 1e12:.0f} TFLOP/s" in (DOCS / "hardware.md").read_text() and f"{RATE / 1e12:.0f} TFLOP/s" in PLAN


@pytest.mark.parametrize("tokens", [600, 1000, 1500])
def test_hours(tokens: int) -> None:
    row = [f"{tokens:,}"]
    for model in ("Qwen2.5-7B", "Qwen2.5-3B"):
        hours = STEPS * step_s(model, tokens) / 3600
        row += [f"{step_s(model, tokens):.0f} s", f"{hours:.0f}, {GPUS * hours:.0f}"]
    assert f"| {' | '.join(row)} |" in PLAN


def test_memory_and_disk(tmp_path: Path) -> None:
    found = on_profile("search_r1_grpo", "Qwen2.5-7B", "8xh100", tmp_path)
    config, weights = found.config, shape("Qwen2.5-7B").parameters
    assert (config.run.groups_per_step * config.run.group_size, config.run.steps) == (TRAJECTORIES, STEPS)
    memory = {a.need.kind: gib(a.need.memory) for a in found.placement.assignments}
    checkpoints = 12 * weights * (config.learner.keep_checkpoints + 1)
    published = 2 * weights * (KEEP_VERSIONS + SPARE_DISK)
    for told in (
        *memory.values(),
        gib(sum(memory_parts(config, weights).values())),
        f"{memory_needed(config) / 1e9:.1f} GB",
        f"{config.launch.redis_maxmemory_mb:,} MiB",
        f"{checkpoints / 1e9:.0f} GB",
        f"{published / 1e9:.0f} GB",
        f"{(checkpoints + published) / 1e9:.0f} GB at `run.dir`",
        f"{STEPS * TRAJECTORIES * 1000 * 6.4 / 1e9:.0f} GB of journal",
        f"{TRAJECTORIES * 2 / step_s('Qwen2.5-7B', 1000):.0f}.",
    ):
        assert told in PLAN, told


def test_the_retrievers_rates_are_those_of_the_figures() -> None:
    gpu, cpu = (json.loads((DOCS / "figures" / f"{name}.json").read_text()) for name in ("retriever_gpu", "retriever"))
    rates = {row["batch"]: row["queries_per_s"] for row in gpu["by_batch"]}
    assert f"{rates[1]:.0f} one at a time, {rates[64]:,.0f} in batches of 64" in PLAN
    core_s = cpu["baseline"]["cpu_ms_per_query"] / 1000 * (21e6 * 768) / (500_000 * 384)
    assert f"{1 / core_s:.0f} for each core (computed from 500,000 vectors)" in PLAN
    assert f"so {128 * core_s:.0f} cores for 128" in PLAN


@pytest.mark.parametrize("name", ["torch_flat", "faiss_flat", "faiss_hnsw", "faiss_ivfpq", "bm25"])
def test_the_memory_of_an_index_is_that_of_foray_index_estimate(name: str) -> None:
    index = index_settings(name, [] if name == "bm25" else ["encoder.dim=768"])
    need = make_plan(index, CorpusStats(21_000_000, exact=True, converted=False), 768, None).as_dict()["need"]
    (row,) = re.findall(rf"^\| `{name}` .+$", PLAN, re.M)
    assert f"| {(need['gpu'] or need['serve']) / 1e9:.1f} GB" in row


def test_expected_scores_are_the_published_ones() -> None:
    told = re.findall(r"^\| (Search-R1 .+?) \|((?: [\d.]+ \|){7})$", REPRODUCE, re.M)
    known = {row.system: [f"{value:g}" for value in row.values.values()] for row in ROWS}
    assert len(told) >= 4
    for system, values in told:
        assert values.replace("|", " ").split() == known[system]
