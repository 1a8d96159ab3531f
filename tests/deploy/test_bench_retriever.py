"""`foray bench retriever`: a small run of all parts, its arithmetic, and results that must be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.retriever.bench import check
from benchmarks.retriever.gpu import bound_s
from benchmarks.retriever.indexes import chosen_index, kinds, recalls
from benchmarks.retriever.load import percentile
from benchmarks.retriever.settings import TYPES
from foray.cli import main
from protocol.errors import ForayError, UserError


@pytest.mark.slow
def test_a_small_run_answers_every_query_and_fills_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "retriever", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loads = {name: report[name] for name in ("service", "burst", "burst_plain", "unbatched")}
    for load in loads.values():
        assert load["answered"] == load["queries"] == load["searched"] > 0 and not load["errors"]
        assert load["cpu_ms_per_query"] > 0 and 0 < load["p50_s"] <= load["p99_s"] <= load["max_s"]
        assert load["health_probes"] > 0 and load["health_failed"] == 0 and load["anon_peak_mib"] > 0
    assert (
        report["value"] == report["service"]["queries_per_s"]
        and report["answers_equal"] == report["service"]["queries"]
    )
    assert report["service"]["mean_batch"] > 1 and report["unbatched"]["mean_batch"] == 1
    assert report["ratio"] == pytest.approx(
        report["baseline"]["cpu_ms_per_query"] / report["service"]["cpu_ms_per_query"], rel=1e-2
    )
    rows = {row["index"]: row for row in report["indexes"]}
    assert list(rows) == ["memory", "faiss_flat", "bm25"]
    assert all(row["build_s"] > 0 and row["disk_mib"] > 0 and row["queries_per_s_1"] > 0 for row in rows.values())
    assert rows["memory"]["recall_10"] == rows["faiss_flat"]["recall_10"] == 1.0
    assert rows["bm25"]["recall_10"] is None and rows["bm25"]["support_3"] is None


def test_the_default_table_has_every_index_that_a_cpu_can_build() -> None:
    assert set(TYPES) <= set(kinds())


def test_an_index_of_the_table_may_have_settings() -> None:
    assert (
        chosen_index("faiss_ivf:nprobe=128:nlist=64").items()
        >= {"type": "faiss_ivf", "nprobe": 128, "nlist": 64}.items()
    )
    for wrong in ("faiss", "bm25:k1=-1", "bm25:nprobe=2"):
        with pytest.raises(UserError):
            chosen_index(wrong)


def test_a_table_that_cannot_be_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "retriever", "--indexes", "bm26"]) == 2
    assert main(["bench", "retriever", "--data", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "unknown index bm26" in err and "nowhere has no corpus" in err and "[retriever]" not in err


def load_of(**facts: Any) -> dict[str, Any]:
    return {"queries": 8, "answered": 8, "errors": {}, "short": 0, "searched": 8} | facts


@pytest.mark.parametrize(
    "facts",
    [{"answered": 7, "errors": {"timeout": 1}}, {"short": 1}, {"searched": 7}],
    ids=["failed", "short", "from a cache"],
)
def test_a_load_with_a_query_that_was_not_really_searched_is_no_result(facts: dict[str, Any]) -> None:
    check({"service": load_of()})
    with pytest.raises(ForayError, match="burst: "):
        check({"service": load_of(), "burst": load_of(**facts)})


def test_recall_is_a_share_of_the_exact_ten_and_of_the_supporting_passages() -> None:
    exact = [[str(i) for i in range(20)], [str(i) for i in range(20)]]
    found = [[str(i) for i in (0, 1, 2, 3, 4, 25, 26, 27, 28, 29)], [str(i) for i in range(10)]]
    report = recalls(found, exact, [["2", "25"], []])
    assert report["recall_10"] == 0.75, "half of the first ten, all of the second"
    assert (report["support_3"], report["support_5"], report["support_10"]) == (0.5, 0.5, 1.0), (
        "of the one that names any"
    )
    assert recalls(found, None, [[], []]) == dict.fromkeys(("recall_10", *(f"support_{k}" for k in (3, 5, 10, 20))))


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)
    assert percentile([3.0], 0.99) == 3.0 and percentile([1.0, 2.0], 0.99) == 2.0


def test_a_small_batch_is_bound_by_memory_and_a_large_one_by_arithmetic() -> None:
    passages, dim, h200, tensor = 21_000_000, 768, 4.8e12, 800e12
    scan = passages * dim * 2 / h200
    assert bound_s(passages, dim, 1, h200, tensor) == bound_s(passages, dim, 64, h200, tensor) == scan
    assert scan == pytest.approx(6.72e-3), "32.3 GB at 4.8 TB/s"
    assert bound_s(passages, dim, 2560, h200, tensor) == pytest.approx(2 * passages * dim * 2560 / tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "retriever_gpu", "--quick"]) == 2
    assert "no GPU found" in capsys.readouterr().err
