"""The phases of the retriever benchmark, in order; each child process ends with its phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.base import Say
from benchmarks.retriever.index import distinct_queries, index_of
from benchmarks.retriever.load import Load
from benchmarks.retriever.raw import Raw
from benchmarks.retriever.service import RetrieverProcess, ServiceMeter, Watch, serving
from benchmarks.retriever.settings import RetrieverBench
from protocol.errors import ForayError
from retriever.config import RetrieverSettings

CHILD_S = 1800.0
WARM_UP = 8


class Phases:
    """One index and one list of distinct queries, used by every phase."""

    def __init__(self, bench: RetrieverBench, directory: Path, say: Say) -> None:
        self._bench, self._directory, self._say = bench, directory, say
        built = index_of(bench, directory, say)
        self._settings = RetrieverSettings.model_validate(
            built.model_dump()
            | {
                "threads": bench.threads,
                "topk": bench.topk,
                "max_batch": bench.max_batch,
                "window_ms": bench.window_ms,
                "cache_mb": 0.0,  # every query must be searched
                "verify_corpus": False,  # takes tens of seconds that are not part of the measurement
            }
        )
        # steady phase, both bursts, warm-up and unbatched phase use consecutive parts of the list
        self._steady = bench.clients * bench.turns
        self._rest = self._steady + 2 * bench.burst
        count = self._rest + WARM_UP + bench.unbatched
        queries, self.ntotal = distinct_queries(self._settings, count)
        self._queries = directory / "queries.json"
        self._queries.write_text(json.dumps(queries))

    def bare(self, batches: list[int], *, checked: bool = False) -> list[dict[str, Any]]:
        """Run bare FAISS over the steady phase's queries for each of `batches`; if `checked`, also the index's search,
        whose answers are the reference of `equal_answers`.
        """
        raw = Raw(
            settings=self._settings.model_dump(mode="json"),
            queries=str(self._queries),
            count=self._steady,
            topk=self._bench.topk,
            batches=batches,
            answers=str(self._directory / "right.json") if checked else "",
        )
        figures: list[dict[str, Any]] = self._child("raw", raw.write(self._directory / "raw.json"))
        for row in figures:
            self._say(
                f"{row['kind']} in batches of {row['batch']}: {row['queries_per_s']:.0f} queries/s, "
                f"{row['cpu_ms_per_query']:.2f} ms CPU each"
            )
        return figures

    def service(self) -> dict[str, dict[str, Any]]:
        """Return the steady phase and the bursts by Foray's client and by plain POSTs, on one service process."""
        bench, steady = self._bench, self._steady
        with serving(self._settings, self._directory, "service", self._say) as service:
            self._load(service, "warm-up", self._rest, WARM_UP, 1)
            return {
                "service": self._load(service, "steady", 0, bench.clients, bench.turns),
                "burst": self._load(service, "burst", steady, bench.burst, 1),
                "burst_plain": self._load(service, "burst_plain", steady + bench.burst, bench.burst, 1, plain=True),
            }

    def unbatched(self) -> dict[str, Any]:
        """Run the service with `max_batch` 1 and no window: a server without batching scans the index per query."""
        settings = self._settings.model_copy(update={"max_batch": 1, "window_ms": 0.0})
        with serving(settings, self._directory, "unbatched", self._say) as service:
            self._load(service, "warm-up", self._rest, 1, 1)
            return self._load(service, "unbatched", self._rest + WARM_UP, self._bench.unbatched, 1)

    def equal_answers(self) -> int:
        """Return the number of answers equal to the index's, hit by hit. Raises ForayError unless all are."""
        received = json.loads((self._directory / "steady.answers.json").read_text())
        right = json.loads((self._directory / "right.json").read_text())
        wrong = sum(ours != index for ours, index in zip(received, right, strict=True))
        if wrong:
            raise ForayError(f"{wrong} of {len(right)} answers differ from those of the index")
        return len(right)

    def _load(
        self, service: RetrieverProcess, name: str, first: int, clients: int, turns: int, *, plain: bool = False
    ) -> dict[str, Any]:
        bench = self._bench
        load = Load(
            url=service.url,
            queries=str(self._queries),
            answers=str(self._directory / f"{name}.answers.json"),
            first=first,
            clients=clients,
            turns=turns,
            topk=bench.topk,
            expected=min(bench.topk, self.ntotal),
            deadline_s=bench.deadline_s,
            connections=bench.connections,
            plain=plain,
        )
        spec = load.write(self._directory / f"{name}.json")
        with ServiceMeter(service) as meter, Watch(service) as watch:
            received: dict[str, Any] = self._child("load", spec)
        figures = received | meter.figures(load.num_queries) | watch.figures()
        self._say(
            f"{name}: {figures['answered']} of {figures['queries']} answered, {figures['queries_per_s']:.0f} queries/s,"
            f" p50 {figures['p50_s']:.2f} s, p99 {figures['p99_s']:.2f} s, batches of {figures['mean_batch']:.0f}, "
            f"{figures['cpu_ms_per_query']:.2f} ms CPU each"
        )
        return figures

    def _child(self, module: str, spec: Path) -> Any:
        argv = [sys.executable, "-m", f"benchmarks.retriever.{module}", str(spec)]
        env = os.environ | {"OMP_NUM_THREADS": str(self._bench.threads)}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=CHILD_S, check=False, env=env)
        if done.returncode:
            raise ForayError(f"{module} failed: {done.stderr.strip()[-2000:]}")
        return json.loads(done.stdout)
