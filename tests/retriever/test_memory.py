"""What a run remembers of its searches: reuse, fusion, bounds, the disk; the real encoder, a counted backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from protocol.search import Passage
from retriever.backends.base import QueryFailure, QueryResult
from retriever.backends.memory.backend import RRF_K, MemoryBackend, fuse, open_memory
from retriever.backends.memory.config import SearchMemorySettings
from retriever.backends.memory.journal import MemoryEntry
from retriever.backends.memory.store import RunMemory
from retriever.metrics import Metrics


def document(name: str) -> bytes:
    return json.dumps({"id": name, "contents": f'"{name}"\ntext'}).encode()


def answer(*names: str) -> QueryResult:
    return QueryResult(tuple(map(document, names)), tuple(1.0 / (i + 1) for i in range(len(names))))


def ids(outcome: QueryResult | QueryFailure) -> list[str]:
    assert isinstance(outcome, QueryResult), outcome
    return [json.loads(item)["id"] for item in outcome.documents]


class Counted:
    """A backend whose answer to `q` is k documents `q-0`, `q-1`, ..; what `faults` names fails."""

    fingerprint = "counted"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.faults: set[str] = set()
        self.closed = 0

    async def search(self, queries: Sequence[str], k: int, run: str) -> list[QueryResult | QueryFailure]:
        self.asked += queries
        return [
            QueryFailure("timeout")
            if q in self.faults
            else answer(*(f"{q}-{i}" for i in range(k if q != "nothing" else 0)))
            for q in queries
        ]

    async def find(self, passage_id: str) -> Passage | None:
        return None

    def info(self) -> dict[str, Any]:
        return {"backend": "counted"}

    async def close(self) -> None:
        self.closed += 1


Start = Callable[..., AbstractAsyncContextManager[tuple[MemoryBackend, Counted, Metrics]]]


@pytest.fixture
def start() -> Start:
    """`async with start(fuse=2) as (memory, inner, metrics):`; keyword arguments are settings."""

    @asynccontextmanager
    async def opened(**fields: Any) -> AsyncIterator[tuple[MemoryBackend, Counted, Metrics]]:
        inner, metrics = Counted(), Metrics()
        memory = await open_memory(inner, SearchMemorySettings.model_validate(fields), metrics)
        try:
            yield memory, inner, metrics
        finally:
            await memory.close()
            await memory.close()

    return opened


def count(metrics: Metrics, name: str) -> float:
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith(f"foray_retriever_{name} ")]
    return float(line.rpartition(" ")[2])


async def test_a_similar_search_of_the_same_run_is_answered_without_asking(start: Start) -> None:
    async with start(reuse_above=0.8) as (memory, inner, metrics):
        (first,) = await memory.search(["capital of France"], 3, "run")
        (again,) = await memory.search(["the capital of France"], 3, "run")
        assert again == first
        assert inner.asked == ["capital of France"]
        (fewer,) = await memory.search(["capital of France?"], 2, "run")
        assert ids(fewer) == ids(first)[:2]
        assert (count(metrics, "memory_reuses_total"), count(metrics, "memory_hits_total")) == (2, 2)


async def test_other_runs_other_meanings_and_more_hits_are_searched(start: Start) -> None:
    async with start(reuse_above=0.8) as (memory, inner, _):
        await memory.search(["capital of France"], 3, "run")
        for query, k, run in [
            ("capital of France", 3, "other"),
            ("capital of France", 3, ""),
            ("capital of France", 3, ""),
            ("radium discovery", 3, "run"),
            ("capital of France", 4, "run"),
        ]:
            await memory.search([query], k, run)
        assert len(inner.asked) == 6


async def test_reuse_can_be_off_and_queries_of_one_batch_know_nothing_of_each_other(start: Start) -> None:
    async with start(reuse_above=None) as (memory, inner, _):
        await memory.search(["capital of France", "the capital of France"], 3, "run")
        await memory.search(["capital of France"], 3, "run")
        assert len(inner.asked) == 3


async def test_failures_and_empty_answers_are_never_remembered(start: Start) -> None:
    async with start(reuse_above=0.8, fuse=3, fuse_above=0) as (memory, inner, metrics):
        inner.faults = {"capital of France"}
        good, bad = await memory.search(["capital of Spain", "capital of France"], 2, "run")
        assert ids(good) and bad == QueryFailure("timeout")
        await memory.search(["nothing"], 2, "run")
        assert count(metrics, "memory_entries_added_total") == 1
        # what is remembered does not make a failure an answer
        assert await memory.search(["capital of France"], 2, "run") == [QueryFailure("timeout")]
        inner.faults = set()
        (now,) = await memory.search(["capital of France"], 2, "run")
        assert "capital of France-0" in ids(now)


async def test_passages_of_the_nearest_earlier_searches_are_fused_in(start: Start) -> None:
    async with start(reuse_above=None, fuse=1, fuse_above=0.3, fuse_weight=1.0) as (memory, inner, metrics):
        await memory.search(["radium discovery"], 2, "run")
        await memory.search(["capital of France"], 2, "run")
        (found,) = await memory.search(["capital city of France"], 4, "run")
        assert ids(found) == [
            "capital city of France-0",
            "capital of France-0",
            "capital city of France-1",
            "capital of France-1",
        ]
        assert isinstance(found, QueryResult)
        assert found.scores[0] == pytest.approx(1 / (RRF_K + 1))
        assert count(metrics, "memory_fusions_total") == 1
        # the memory does not feed on itself: what was fused is not remembered as the search's own
        (third,) = await memory.search(["capital city of France now"], 1, "run")
        assert ids(third) == ["capital city of France now-0"]
        assert len(inner.asked) == 4


async def test_the_same_history_gives_the_same_answers(start: Start) -> None:
    rng = np.random.default_rng(0)
    words = [
        "capital",
        "city",
        "river",
        "France",
        "Spain",
        "Poland",
        "radium",
        "discovery",
        "book",
        "author",
        "film",
        "year",
    ]
    queries = [" ".join(rng.choice(words, 3)) for _ in range(150)]

    async def history() -> list[list[QueryResult | QueryFailure]]:
        async with start(reuse_above=0.9, fuse=3, fuse_above=0.2, max_entries=40) as (memory, _, _):
            return [await memory.search(queries[i : i + 3], 3, f"run{i % 2}") for i in range(0, 150, 3)]

    assert await history() == await history()


async def test_entries_runs_and_bytes_are_bounded(start: Start) -> None:
    async with start(max_entries=10, max_runs=3, max_mb=0.03) as (memory, _, metrics):
        for i in range(200):
            await memory.search([f"unlike{i} other{i * 7}"], 1, f"run{i // 40}")
            held = memory.info()["memory"]
            assert held["runs"] <= 3 and held["entries"] <= 30
            assert count(metrics, "memory_bytes") <= 0.03 * 2**20
        assert count(metrics, "memory_evictions_total") == 200 - held["entries"]


async def test_the_least_recently_used_search_is_forgotten_first(start: Start) -> None:
    async with start(reuse_above=0.99, max_entries=2) as (memory, inner, _):
        for query in ["alpha one", "beta two", "alpha one", "gamma three", "alpha one", "beta two"]:
            await memory.search([query], 1, "run")
        assert inner.asked == ["alpha one", "beta two", "gamma three", "beta two"]


async def test_documents_of_earlier_answers_are_found_by_id_until_they_are_forgotten(start: Start) -> None:
    async with start(max_entries=1) as (memory, _, _):
        await memory.search(["alpha one"], 1, "run")
        passage = await memory.find("alpha one-0")
        assert passage is not None and passage.contents == '"alpha one-0"\ntext'
        assert await memory.find("alpha one-1") is None
        await memory.search(["beta two"], 1, "run")
        assert await memory.find("alpha one-0") is None


async def test_a_restarted_service_remembers(start: Start, tmp_path: Path) -> None:
    settings = {"reuse_above": 0.99, "directory": tmp_path / "memory"}
    async with start(**settings) as (memory, _, _):
        before = await memory.search(["alpha one", "東京 \ud7ff"], 2, "run/../x")
    async with start(**settings) as (memory, inner, _):
        assert await memory.search(["alpha one", "東京 \ud7ff"], 2, "run/../x") == before
        assert inner.asked == []
        assert await memory.search(["alpha one"], 2, "other") and inner.asked == ["alpha one"]


async def test_a_line_torn_by_a_crash_is_dropped_and_the_rest_kept(start: Start, tmp_path: Path) -> None:
    settings = {"reuse_above": 0.99, "directory": tmp_path}
    async with start(**settings) as (memory, _, _):
        for query in ("alpha one", "beta two", "gamma three"):
            await memory.search([query], 1, "run")
    (path,) = tmp_path.glob("*/*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b"not an entry\n" + lines[2] + lines[3][:-10])
    async with start(**settings) as (memory, inner, _):
        for query in ("alpha one", "beta two", "gamma three"):
            await memory.search([query], 1, "run")
        assert inner.asked == ["gamma three"]
    async with start(**settings) as (memory, inner, _):
        for query in ("alpha one", "beta two", "gamma three"):
            await memory.search([query], 1, "run")
        assert inner.asked == []


async def test_a_rewrite_that_was_killed_leaves_nothing_to_the_next_process(start: Start, tmp_path: Path) -> None:
    async with start(directory=tmp_path) as (memory, _, _):
        await memory.search(["alpha one"], 1, "run")
    (path,) = tmp_path.glob("*/*.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: 1 / 0)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(ZeroDivisionError):
            atomic_write(path, b"a file that is never whole", durable=False)
    assert len(list(path.parent.glob(".*"))) == 1
    async with start(directory=tmp_path) as (memory, inner, _):
        await memory.search(["alpha one"], 1, "run")
        assert inner.asked == [] and list(path.parent.glob(".*")) == []


async def test_the_disk_is_bounded_as_the_memory_is(start: Start, tmp_path: Path) -> None:
    settings = {"directory": tmp_path, "max_entries": 4, "max_runs": 2}
    async with start(**settings) as (memory, _, _):
        for i in range(300):
            await memory.search([f"unlike{i} other{i * 7}"], 1, f"run{i // 100}")
    files = list(tmp_path.glob("*/*.jsonl"))
    assert len(files) == 2
    assert all(len(path.read_bytes().splitlines()) <= 2 * 4 + 64 + 2 for path in files)
    async with start(**settings | {"max_runs": 1}) as (memory, _, _):
        assert (memory.info()["memory"]["runs"], memory.info()["memory"]["entries"]) == (1, 4)
    assert len(list(tmp_path.glob("*/*.jsonl"))) == 1


async def test_replicas_that_share_a_directory_have_a_memory_each(start: Start, tmp_path: Path) -> None:
    async with (
        start(directory=tmp_path) as (first, _, _),
        start(directory=tmp_path) as (second, inner, _),
    ):
        await first.search(["alpha one"], 1, "run")
        await second.search(["alpha one"], 1, "run")
        assert inner.asked == ["alpha one"]
        assert len(list(tmp_path.glob("*/*.jsonl"))) == 2


async def test_a_directory_that_cannot_be_written_is_explained(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot store the search memory"):
        async with start(directory=tmp_path / "file"):
            pass


async def test_a_memory_that_fails_costs_no_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        raise RuntimeError("no more memory")

    async with start() as (memory, _, metrics):
        monkeypatch.setattr(memory._encoder, "encode_queries", broken)
        (found,) = await memory.search(["alpha one"], 1, "run")
        assert ids(found) == ["alpha one-0"]
        assert count(metrics, "memory_errors_total") == 1


async def test_many_searches_at_once_are_all_answered(start: Start) -> None:
    async with start(fuse=2, fuse_above=0.1, max_entries=16) as (memory, _, _):
        found = await asyncio.gather(*(memory.search([f"alpha{i}", f"beta{i}"], 2, f"run{i % 3}") for i in range(60)))
        assert all(isinstance(outcome, QueryResult) and outcome.documents for pair in found for outcome in pair)


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6), min_size=1, max_size=5),
    st.integers(1, 8),
    st.floats(0.1, 1),
)
def test_fusion_is_the_sum_of_reciprocal_ranks(lists: list[list[str]], k: int, weight: float) -> None:
    fused = fuse(answer(*lists[0]), [answer(*names) for names in lists[1:]], k, weight)
    expected: dict[str, float] = {}
    for number, names in enumerate(lists):
        for rank, name in enumerate(names, 1):
            expected[name] = expected.get(name, 0) + (weight if number else 1) / (60 + rank)
    assert list(fused.scores) == sorted(fused.scores, reverse=True)
    assert dict(zip(ids(fused), fused.scores, strict=True)) == {
        name: pytest.approx(expected[name]) for name in ids(fused)
    }
    assert len(fused.documents) == min(k, len(expected))
    assert sorted(expected.values(), reverse=True)[: len(fused.scores)] == pytest.approx(list(fused.scores))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.booleans()), max_size=60))
def test_a_runs_memory_is_an_lru_map_by_query(steps: list[tuple[int, int, bool]]) -> None:
    memory, model = RunMemory(4, 5), dict[str, MemoryEntry]()
    for name, k, popped in steps:
        vector = np.zeros(4, dtype=np.float32)
        vector[name % 4] = 1
        entry = MemoryEntry(f"q{name}", k, vector, answer(f"{name}-{k}"))
        if popped and model:
            assert memory.pop_oldest() is model.pop(next(iter(model)))
            continue
        gone = memory.add(entry)
        old = model.pop(entry.query, None)
        kept = old if old is not None and old.k > k else entry
        model[entry.query] = kept
        expected = [old] if old is not None and kept is entry else []
        if len(model) > 5:
            expected = [model.pop(next(iter(model)))]
        assert gone == expected
        assert memory.entries() == list(model.values())
        assert memory.num_bytes == sum(item.num_bytes for item in model.values())
        near = [item for _, item in memory.nearest(vector, 9, 0.5)]
        assert set(near) == {item for item in model.values() if item.vector @ vector > 0.5}
