"""The clients of the retriever benchmark, in a separate process: Foray's search client with many concurrent callers, or
plain POSTs without concurrency limit, retry or deadline, as in Search-R1's trainer.

    python -m benchmarks.retriever.load SPEC.json

loop    consumes             produces          waits for       unblocked by
client  its own queries      answers, times    each answer     the service, or the client's deadline
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from protocol.runtime.net import allow_many_files
from protocol.search import Passage, SearchResponse


@dataclass(frozen=True)
class Load:
    """One phase: `clients` send `turns` queries each, one after another.

    queries      file with a JSON list; the phase uses clients * turns of them from `first`
    connections  maximum connections of Foray's client; 0: the default of its settings
    expected     number of hits in every answer
    answers      file for the ids of every answer, in the order of the queries
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
    plain: bool = False

    def write(self, path: Path) -> Path:
        """Write the specification for the child process."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def num_queries(self) -> int:
        return self.clients * self.turns


@dataclass
class Seen:
    """The results that the clients received."""

    ids: list[list[str]]
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    short: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` (not empty) do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


Ask = Callable[[str], Awaitable[tuple[Sequence[Passage], str]]]
"""Takes a query; returns passages and "", or none and the error."""


@asynccontextmanager
async def own_client(load: Load) -> AsyncIterator[Ask]:
    """Yield Foray's client as in a rollout server, with another deadline."""
    from rollout_server.search.client import HttpSearch, HttpSearchSettings

    chosen = {"connections": load.connections} if load.connections else {}
    settings = HttpSearchSettings.model_validate(
        {"urls": load.url, "topk": load.topk, "deadline_s": load.deadline_s, **chosen}
    )
    search = HttpSearch(settings)

    async def ask(query: str) -> tuple[Sequence[Passage], str]:
        result = await search(query)
        return result.passages, result.error

    try:
        yield ask
    finally:
        await search.close()


@asynccontextmanager
async def plain_client(load: Load) -> AsyncIterator[Ask]:
    """Yield a client that sends one POST per query immediately."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(query: str) -> tuple[Sequence[Passage], str]:
            body = {"queries": [query], "topk": load.topk, "return_scores": True}
            try:
                async with session.post(f"{load.url}/retrieve", json=body) as response:
                    if response.status != 200:
                        return (), f"http_{response.status}"
                    (hits,) = SearchResponse.model_validate_json(await response.read()).result
            except aiohttp.ClientError as error:
                return (), type(error).__name__
            return [hit.document for hit in hits], ""

        yield ask


async def play(load: Load, queries: Sequence[str]) -> dict[str, Any]:
    """Run the phase and return its figures. A failed query (after the client's retries) is counted by its error."""
    seen = Seen([[] for _ in queries])

    async def client(ask: Ask, number: int) -> None:
        for place in range(number * load.turns, (number + 1) * load.turns):
            begun = time.perf_counter()
            passages, error = await ask(queries[place])
            seen.latencies_s.append(time.perf_counter() - begun)
            if error:
                seen.errors[error] += 1
                continue
            seen.ids[place] = [passage.id for passage in passages]
            seen.short += len(passages) != load.expected

    begun, cpu = time.perf_counter(), time.process_time()
    async with (plain_client if load.plain else own_client)(load) as ask, asyncio.TaskGroup() as clients:
        for number in range(load.clients):
            clients.create_task(client(ask, number))
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
    allow_many_files()
    load = Load(**json.loads(Path(spec).read_text()))
    queries = json.loads(Path(load.queries).read_text())[load.first : load.first + load.num_queries]
    print(json.dumps(asyncio.run(play(load, queries))))


if __name__ == "__main__":
    main(sys.argv[1])
