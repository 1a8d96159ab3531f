"""The table of `foray bench retriever`: all index types on one corpus, each built and searched by a child process.

    python -m benchmarks.retriever.indexes SPEC.json

There are two kinds of recall: `recall_10` is the share of the exact index's ten best that the index finds (dense
indexes), and `support_K` the share of a question's supporting passages among the K best, if the questions name them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from benchmarks.base import Say
from benchmarks.retriever.index import distinct_queries, synthetic_index
from benchmarks.retriever.settings import RetrieverBench
from protocol.errors import ForayError, UserError
from retriever.index import open_index
from retriever.index.base import NO_ROW
from retriever.index.config import IndexSettings

CORPUS = "corpus_multihop.jsonl"
SUPPORT_AT = (3, 5, 10, 20)
DEPTH = 20
SINGLES = 200
"""Number of queries to search one by one."""
SYNTHETIC_QUERIES = 512
EXACT = "faiss_flat"
NOT_DENSE = ("bm25", "hybrid")
"""Indexes that are not compared with the exact index of vectors: they rank by something else."""
CHILD_S = 3600.0


@dataclass(frozen=True)
class IndexRun:
    """One line of the table to measure.

    index      settings of the index
    questions  file with a JSON list of [query, ids of supporting passages]
    found      file for the rows found, a list per query
    """

    index: dict[str, Any]
    corpus: str
    directory: str
    questions: str
    found: str

    def write(self, path: Path) -> Path:
        """Write the specification for the child process."""
        path.write_text(json.dumps(asdict(self)))
        return path


def kinds() -> list[str]:
    """Return the names of all index types."""
    (union, *_) = get_args(IndexSettings)
    return [member.model_fields["type"].default for member in get_args(union)]


def chosen_index(name: str) -> dict[str, Any]:
    """Return settings for `faiss_ivf:nprobe=128`. Raises UserError for an unknown index or setting."""
    kind, *given = name.split(":")
    if kind not in kinds():
        raise UserError(f"unknown index {kind}", todo=f"--indexes takes {', '.join(kinds())}")
    content = {"type": kind} | dict(item.partition("=")[::2] for item in given)
    try:
        settings: IndexSettings = TypeAdapter(IndexSettings).validate_python(content)
    except ValidationError as error:
        raise UserError(f"invalid index {name}", why=error.errors()[0]["msg"]) from None
    return settings.model_dump(mode="json")


def table_of(bench: RetrieverBench, directory: Path, say: Say) -> list[dict[str, Any]]:
    """Return a row for each of `bench.indexes`, in order. Raises UserError for an invalid one."""
    chosen = {name: chosen_index(name) for name in bench.indexes}
    corpus, questions = _asked(bench, directory, say)
    asked = directory / "questions.json"
    asked.write_text(json.dumps(questions))
    measured, found = {}, {}
    for number, (name, index) in enumerate(chosen.items()):
        answers = directory / f"table-{number}.found.json"
        row = IndexRun(index, str(corpus), str(directory / f"table-{number}"), str(asked), str(answers))
        measured[name] = built = _child(row.write(directory / f"table-{number}.json"))
        found[name] = json.loads(answers.read_text())
        say(f"{name}: built in {built['build_s']:.1f} s, {built['queries_per_s_64']:.0f} queries/s in batches of 64")
    return [
        {"index": name} | figures | recalls(found[name], _measure_of(name, found), [ids for _, ids in questions])
        for name, figures in measured.items()
    ]


def _measure_of(name: str, found: dict[str, list[list[str]]]) -> list[list[str]] | None:
    return None if name.partition(":")[0] in NOT_DENSE else found.get(EXACT)


def recalls(
    found: Sequence[Sequence[str]], exact: Sequence[Sequence[str]] | None, supporting: Sequence[Sequence[str]]
) -> dict[str, float | None]:
    """Return means over the queries; None if there is nothing to compare with.

    found, exact  ids of the hits of each query, best first
    supporting    ids of the passages that support the answer, empty if unknown
    """
    known = [(set(ids), hits) for ids, hits in zip(supporting, found, strict=True) if ids]
    support: dict[str, float | None] = {
        f"support_{k}": fmean(len(ids & set(hits[:k])) / len(ids) for ids, hits in known) if known else None
        for k in SUPPORT_AT
    }
    pairs = zip(found, exact or (), strict=exact is not None)
    shares = [len(set(ours[:10]) & set(best[:10])) / len(best[:10]) for ours, best in pairs if best]
    return {"recall_10": fmean(shares) if shares else None} | support


def check_table(bench: RetrieverBench) -> None:
    """Raise UserError for an invalid table, before anything is measured."""
    for name in bench.indexes:
        chosen_index(name)
    if bench.data and not Path(bench.data, CORPUS).is_file():
        raise UserError(f"{bench.data} has no {CORPUS}", todo="give another --data, or omit it for synthetic text")


def _asked(bench: RetrieverBench, directory: Path, say: Say) -> tuple[Path, list[tuple[str, list[str]]]]:
    """Return the corpus, and each question with the ids of its supporting passages."""
    if bench.data:
        data = Path(bench.data)
        lines = [line for path in sorted(data.glob("questions_*.jsonl")) for line in path.read_text().splitlines()]
        records = [record for line in lines if (record := json.loads(line)).get("supporting_ids")]
        if not records:
            raise UserError(f"{data} has no questions_*.jsonl with supporting_ids", todo="give another --data")
        return data / CORPUS, [(one["question"], one["supporting_ids"]) for one in records]
    settings = synthetic_index(bench.table_passages, directory / "table-corpus", say)
    queries, _ = distinct_queries(settings, SYNTHETIC_QUERIES)
    return settings.corpus, [(query, []) for query in queries]


def _child(spec: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.retriever.indexes", str(spec)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=CHILD_S, check=False, env=env)
    if done.returncode:
        raise ForayError(f"an index of the table failed: {done.stderr.strip()[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def measure(row: IndexRun) -> dict[str, float]:
    """Build one index, search all questions in batches, then some of them one by one."""
    from retriever.corpus.corpus import Corpus
    from retriever.indexing.build import build_index

    settings: IndexSettings = TypeAdapter(IndexSettings).validate_python(row.index)
    directory = Path(row.directory)
    begun, cpu = time.perf_counter(), time.process_time()
    build_index(row.corpus, directory, settings, progress=lambda line: None)
    figures = {"build_s": time.perf_counter() - begun, "build_cpu_s": time.process_time() - cpu}
    figures["disk_mib"] = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / 2**20
    queries = [query for query, _ in json.loads(Path(row.questions).read_text())]
    index = open_index(settings, directory, threads=1)
    index.search(queries[:1], DEPTH)
    found: list[list[int]] = []
    for batch, count in ((64, len(queries)), (1, min(SINGLES, len(queries)))):
        begun, cpu, found_now = time.perf_counter(), time.process_time(), []
        for start in range(0, count, batch):
            found_now += index.search(queries[start : min(start + batch, count)], DEPTH).rows.tolist()
        figures[f"queries_per_s_{batch}"] = count / (time.perf_counter() - begun)
        figures[f"cpu_ms_{batch}"] = 1000 * (time.process_time() - cpu) / count
        found = found or found_now
    corpus = Corpus(Path(row.corpus), directory)
    ids = [[corpus.passage(place).id for place in rows if place != NO_ROW] for rows in found]
    Path(row.found).write_text(json.dumps(ids))
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(IndexRun(**json.loads(Path(sys.argv[1]).read_text())))))
