"""A small corpus, and a service in this process whose index calls can be counted and held."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.backends.base import QueryResult
from retriever.backends.factory import OpenBackend
from retriever.backends.index import IndexBackend, Searcher, open_searcher
from retriever.config import RetrieverSettings
from retriever.metrics import Metrics
from retriever.server import attach
from retriever.serving.service import QueryService

TITLES = ("Ada", "Brontë", "Curie", "東京", "Émile", "Fermat", "Gödel", "Hopper")


def write_corpus(path: Path, contents: Iterable[str]) -> Path:
    """Lines {"id": "d<row>", "contents"}."""
    lines = [json.dumps({"id": f"d{row}", "contents": text}) for row, text in enumerate(contents)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 passages, five each about eight titles; each has a unique number word."""
    return write_corpus(
        tmp_path / "corpus.jsonl",
        (f'"{TITLES[i % 8]}"\n{TITLES[i % 8]} wrote number{i} to {TITLES[(i + 1) % 8]} city.' for i in range(40)),
    )


@pytest.fixture
def settings(corpus: Path) -> Callable[..., RetrieverSettings]:
    """RetrieverSettings over the corpus on a free port; keyword arguments override."""

    def make(**fields: Any) -> RetrieverSettings:
        return RetrieverSettings.model_validate({"corpus": corpus, "port": 0, **fields})

    return make


@dataclass
class Watched:
    """A searcher whose calls are recorded; while `gate` is clear they wait in the owner thread."""

    searcher: Searcher
    calls: list[tuple[list[str], int]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    poison: str = "\0"
    entered: int = 0

    def search(self, queries: Sequence[str], k: int) -> list[QueryResult]:
        """As Searcher.search; raises where the poison is among the queries."""
        self.entered += 1
        assert self.gate.wait(20)
        self.calls.append((list(queries), k))
        if self.poison in queries:
            raise ValueError("poisoned")
        return self.searcher.search(queries, k)

    def __getattr__(self, name: str) -> Any:
        """The rest is the searcher's."""
        return getattr(self.searcher, name)


@dataclass
class Bench:
    """Running searches over a real index, and the HTTP address of the service around them."""

    watched: Watched
    searches: QueryService
    metrics: Metrics
    url: str

    def count(self, name: str, **labels: str) -> float:
        """A metric's value now; `name` without its prefix."""
        (value,) = [
            float(line.rpartition(" ")[2])
            for line in self.metrics.render().decode().splitlines()
            if line.startswith(f"foray_retriever_{name}") and line.rpartition(" ")[0] == _series(name, labels)
        ]
        return value


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"foray_retriever_{name}" + (f"{{{inside}}}" if inside else "")


@pytest.fixture
def bench(settings: Callable[..., RetrieverSettings]) -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """`async with bench(queue_limit=2) as b:` the gate is open at first; keyword arguments are settings."""

    @asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[Bench]:
        chosen = settings(**fields)
        service = RetrieverState(chosen)
        with ThreadPoolExecutor(1) as owner:
            loop = asyncio.get_running_loop()
            watched = Watched(await loop.run_in_executor(owner, open_searcher, chosen))
            watched.gate.set()
            index = IndexBackend(cast(Searcher, watched), owner)
            embedder = index if watched.searcher.has_encoder else None
            opened = OpenBackend(index, embedder, max_concurrent_batches=1, max_batch=chosen.max_batch)
            loops = attach(service, opened)
            assert service.searches is not None
            runner = web.AppRunner(create_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            running = [asyncio.create_task(loop) for loop in loops.values()]
            try:
                port = runner.addresses[0][1]
                yield Bench(watched, service.searches, service.metrics, f"http://127.0.0.1:{port}")
            finally:
                watched.gate.set()
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await runner.cleanup()

    return start
