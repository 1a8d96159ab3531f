"""The clients of the retriever benchmark, in a process of their own: Foray's search client, asked by many at once.

    python -m deploy.bench.retriever_load SPEC.json

loop    consumes             produces          waits for       unblocked by
client  its own queries      answers, times    each answer     the service, or the client's deadline
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Load:
    """One phase: `clients` ask `turns` queries each, one after the other.

    queries      file with a JSON list; the phase takes clients * turns of them from `first`
    connections  of the client; 0: one for every client
    expected     hits that every answer has
    answers      file that takes the ids of every answer, in the order of the queries
    """

    url: str
    queries: str
    answers: str
    first: int
    clients: int
    turns: int
    topk: int
    expected: int
    deadline_s: float
    connections: int = 0

    def write(self, path: Path) -> Path:
        """For the child."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def num_queries(self) -> int:
        return self.clients * self.turns


@dataclass
class Seen:
    """What the clients were told."""

    ids: list[list[str]]
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    short: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` (not empty) do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


async def play(load: Load, queries: Sequence[str]) -> dict[str, Any]:
    """Figures of the phase. A query that failed after the client's retries is counted by its error."""
    from rollout_server.search.http import HttpSearchSettings

    settings = HttpSearchSettings(
        urls=(load.url,),
        topk=load.topk,
        deadline_s=load.deadline_s,
        connections=load.connections or load.clients,
    )
    search = settings.build()
    seen = Seen([[] for _ in queries])

    async def client(number: int) -> None:
        for place in range(number * load.turns, (number + 1) * load.turns):
            begun = time.perf_counter()
            result = await search(queries[place])
            seen.latencies_s.append(time.perf_counter() - begun)
            if result.error:
                seen.errors[result.error] += 1
                continue
            seen.ids[place] = [passage.id for passage in result.passages]
            seen.short += len(result.passages) != load.expected

    begun, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as clients:
            for number in range(load.clients):
                clients.create_task(client(number))
    finally:
        await search.close()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    Path(load.answers).write_text(json.dumps(seen.ids))
    return {
        "queries": load.num_queries,
        "clients": load.clients,
        "answered": load.num_queries - seen.errors.total(),
        "errors": dict(seen.errors),
        "short": seen.short,
        "seconds": seconds,
        "queries_per_s": load.num_queries / seconds,
        "p50_s": percentile(seen.latencies_s, 0.5),
        "p99_s": percentile(seen.latencies_s, 0.99),
        "max_s": max(seen.latencies_s),
        "client_cpu_ms_per_query": 1000 * cpu / load.num_queries,
    }


def main(spec: str) -> None:
    """Play the phase and print its figures as JSON."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a burst has more connections than 1024
    load = Load(**json.loads(Path(spec).read_text()))
    queries = json.loads(Path(load.queries).read_text())[load.first : load.first + load.num_queries]
    print(json.dumps(asyncio.run(play(load, queries))))


if __name__ == "__main__":
    main(sys.argv[1])
