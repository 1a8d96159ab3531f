"""Dialects beyond their formats: causes per query, service without a corpus, concurrency."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.errors import UserError
from protocol.search import Passage, SearchResponse
from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.backends.base import QueryFailure, QueryResult
from retriever.backends.factory import OpenBackend
from retriever.backends.index import RerankStage, Searcher, document_json, open_searcher
from retriever.config import RetrieverSettings
from retriever.index.base import NO_ROW, Hits
from retriever.index.config import FaissHnswSettings
from retriever.indexing.build import build_index
from retriever.server import attach, running
from tests.support.waiting import eventually

Settings = Callable[..., RetrieverSettings]
StartBench = Callable[..., AbstractAsyncContextManager[Any]]


class Scripted:
    """A backend that answers each query with a document of its name, unless the script names a fault or an event to
    wait for."""

    fingerprint = "scripted"

    def __init__(self, script: dict[str, QueryFailure | asyncio.Event | Exception]) -> None:
        self.script = script
        self.asked: list[list[str]] = []

    async def search(self, queries: Sequence[str], k: int) -> list[QueryResult | QueryFailure]:
        self.asked.append(list(queries))
        return [await self._one(query) for query in queries]

    async def _one(self, query: str) -> QueryResult | QueryFailure:
        part = self.script.get(query)
        if isinstance(part, Exception):
            raise part
        if isinstance(part, QueryFailure):
            return part
        if part is not None:
            await part.wait()
        return QueryResult((document_json(Passage(id=query, contents=query)),), (1.0,))

    async def find(self, passage_id: str) -> Passage | None:
        return None

    def info(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None: ...


@asynccontextmanager
async def serving(
    backend: Scripted, max_concurrent_batches: int = 1, max_batch: int = 512, **fields: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, RetrieverState]]:
    """A service over a scripted backend, and a session to it."""
    service = RetrieverState(RetrieverSettings.model_validate({"window_ms": 0, **fields}))
    opened = OpenBackend(backend, None, max_concurrent_batches=max_concurrent_batches, max_batch=max_batch)
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(loop) for loop in attach(service, opened).values()]
        runner = web.AppRunner(create_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
                yield session, service
        finally:
            await runner.cleanup()
            for loop in loops:
                loop.cancel()


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("scores", [True, False])
async def test_a_partial_answer_names_the_cause_of_each_failed_query(scores: bool) -> None:
    backend = Scripted({"bad": QueryFailure("timeout", "10 s"), "worse": QueryFailure("quota")})
    async with serving(backend) as (session, service):
        body = {"queries": ["good", "bad", "", "worse", "fine"], "return_scores": scores, "partial": True}
        status, answer = await post(session, "/retrieve", body)
        assert status == 200
        assert answer["errors"] == [None, "timeout", None, "quota", None]
        assert [len(hits) for hits in answer["result"]] == [1, 0, 0, 0, 1]
        if scores:
            SearchResponse.model_validate(answer)
        metrics = service.metrics.render().decode()
        assert 'foray_retriever_failed_total{cause="timeout"} 1.0' in metrics
        # the failures were not kept: they are asked for again, and the good ones are not
        backend.script.clear()
        _, again = await post(session, "/retrieve", body)
        assert "errors" not in again
        assert backend.asked[1:] == [["bad", "worse"]]


async def test_without_partial_one_failure_fails_the_request_in_every_form() -> None:
    backend = Scripted({"bad": QueryFailure("timeout", "10 s"), "ours": QueryFailure("index", "KeyError: 3")})
    async with serving(backend) as (session, _):
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/retrieve", {"queries": ["good", "bad"]}),
            ("/search", {"query": "bad"}),
            ("/batch_search", {"query": ["bad", "good"], "return_score": True}),
        ]
        for path, body in bodies:
            status, answer = await post(session, path, body)
            assert (status, answer["cause"]) == (502, "timeout")
            assert "10 s" in answer["error"]
        status, answer = await post(session, "/retrieve", {"queries": ["ours"]})
        assert (status, answer["cause"]) == (500, "index")


async def test_a_backend_that_raises_ends_neither_the_service_nor_later_searches() -> None:
    async with serving(Scripted({"boom": RuntimeError("bug")})) as (session, _):
        status, answer = await post(session, "/retrieve", {"queries": ["boom"], "partial": True})
        assert (status, answer) == (200, {"result": [[]], "errors": ["internal"]})
        assert (await post(session, "/retrieve", {"queries": ["fine"]}))[0] == 200


async def test_a_slow_answer_of_an_online_engine_blocks_no_other() -> None:
    slow = asyncio.Event()
    async with serving(Scripted({"slow": slow}), max_concurrent_batches=4, max_batch=1) as (session, service):
        held = asyncio.create_task(post(session, "/retrieve", {"queries": ["slow", "beside it"]}))
        await eventually(lambda: b"queue 1.0" in service.metrics.render(), "only the slow one is left")
        async with asyncio.timeout(5):
            for i in range(20):
                assert (await post(session, "/search", {"query": f"quick{i}"}))[0] == 200
        assert not held.done()
        slow.set()
        status, answer = await held
        assert status == 200 and [hits[0]["id"] for hits in answer["result"]] == ["slow", "beside it"]


async def test_no_more_calls_are_made_at_once_than_there_are_lanes() -> None:
    slow = asyncio.Event()
    backend = Scripted({f"q{i}": slow for i in range(10)})
    async with serving(backend, max_concurrent_batches=3, max_batch=1) as (session, _):
        held = asyncio.create_task(post(session, "/retrieve", {"queries": [f"q{i}" for i in range(10)]}))
        await eventually(lambda: len(backend.asked) == 3, "three lanes are busy")
        assert (await post(session, "/retrieve", {"queries": []})) == (200, {"result": []})
        assert len(backend.asked) == 3
        slow.set()
        assert (await held)[0] == 200
        assert len(backend.asked) == 10


async def test_a_refused_client_gets_the_time_until_the_queue_is_done() -> None:
    slow = asyncio.Event()
    backend = Scripted({"held": slow})
    async with serving(backend, queue_limit=20, max_batch=1) as (session, service):
        await post(session, "/retrieve", {"queries": ["quick"]})
        assert service.searches is not None
        service.searches.queue_limit.record_batch(1, 0.001)
        held = asyncio.create_task(post(session, "/retrieve", {"queries": ["held", *(f"q{i}" for i in range(19))]}))
        await eventually(lambda: b"queue 20.0" in service.metrics.render(), "the queue is full")
        waits = []
        for seconds_each in (0.001, 0.4, 1e6):
            for _ in range(40):
                service.searches.queue_limit.record_batch(1, seconds_each)
            async with session.post("/retrieve", json={"queries": ["more"]}) as response:
                assert response.status == 429
                waits.append(int(response.headers["Retry-After"]))
        assert waits[0] == 1 and 8 <= waits[1] <= 9 and waits[2] == 30
        slow.set()
        assert (await held)[0] == 200


async def test_a_service_of_an_online_engine_opens_no_corpus(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.query["q"] == "broken":
            return web.Response(text="<html>", content_type="text/html")
        hit = {"title": "T", "content": "about it", "url": "https://example.org/a?b=c"}
        return web.json_response({"results": [hit]})

    app = web.Application()
    app.router.add_get("/search", answer)
    async with TestServer(app) as server:
        online = {"type": "searxng", "base_url": str(server.make_url("/search")), "cost_per_request": 0.5}
        settings = RetrieverSettings.model_validate({"corpus": tmp_path / "absent", "online": online, "port": 0})
        async with running(settings) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            _, found = await post(session, "/retrieve", {"queries": ["x", "broken"], "partial": True})
            assert found["errors"] == [None, "garbage"]
            async with session.get("/passages", params={"id": found["result"][0][0]["id"]}) as response:
                assert (response.status, await response.json()) == (200, found["result"][0][0])
            async with session.get("/metrics") as response:
                text = await response.text()
            status, _ = await post(session, "/v1/embeddings", {"input": "a"})
            assert status == 404
        assert 'foray_retriever_provider_cost_total{provider="searxng"} 1.0' in text
        assert settings.needed_corpus is None


async def test_a_built_index_names_its_own_corpus_and_settings(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    build_index(corpus, out, FaissHnswSettings(ef_search=40), progress=lambda line: None)
    settings = RetrieverSettings(index_dir=out, port=0)
    assert settings.needed_corpus is None
    async with running(settings) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        _, answer = await post(session, "/retrieve", {"queries": ["number7"], "topk": 1})
        assert answer["result"][0][0]["id"] == "d7"
        async with session.get("/info") as response:
            info = await response.json()
    assert (info["type"], info["search_time"]["ef_search"]) == ("faiss_hnsw", 40)
    corpus.rename(tmp_path / "elsewhere.jsonl")
    with pytest.raises(UserError, match="was moved or removed"):
        open_searcher(settings)
    with pytest.raises(UserError, match="is not a built index"):
        open_searcher(RetrieverSettings(index_dir=tmp_path / "absent"))


def test_settings_of_the_search_are_part_of_the_fingerprint(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    build_index(corpus, out, FaissHnswSettings(), progress=lambda line: None)
    prints = {
        open_searcher(RetrieverSettings(corpus=corpus, index_dir=out, index=index)).fingerprint
        for index in (FaissHnswSettings(), FaissHnswSettings(ef_search=77), FaissHnswSettings(ef_search=77))
    }
    assert len(prints) == 2


class ByLength:
    """A reranker: longer texts are better."""

    def scores(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Any]:
        return [np.asarray([len(text) for text in texts], dtype=np.float32) for _, texts in pairs]


def test_reranking_orders_the_candidates_and_leaves_the_rest_behind_them() -> None:
    stage = RerankStage(ByLength(), candidates=3, identity={})
    texts = ["a", "ccc", "bb", "dddd", "ccc"]
    ranked = stage.apply(["q", "r"], [([0, 1, 2, 3], [9.0, 8, 7, 6]), ([], [])], lambda row: texts[row])
    assert ranked == [([1, 2, 0, 3], [3.0, 2.0, 1.0, 0.0]), ([], [])]
    # equal scores keep the index's order
    assert stage.apply(["q"], [([4, 1], [1.0, 1.0])], lambda row: texts[row])[0][0] == [4, 1]


def test_the_index_returns_the_candidates_and_answers_are_cut_to_k(corpus: Path) -> None:
    settings = RetrieverSettings(corpus=corpus)
    plain = open_searcher(settings)
    reranked = Searcher(
        plain._index, plain._corpus, plain._manifest, settings.index, RerankStage(ByLength(), 20, {"a": "reranker"})
    )
    assert reranked.fingerprint != plain.fingerprint
    (answer,) = reranked.search(["number7 letter Curie"], 2)
    texts = [json.loads(document)["contents"] for document in plain.search(["number7 letter Curie"], 20)[0].documents]
    best = sorted(texts, key=lambda text: -len(text))[:2]
    assert [json.loads(document)["contents"] for document in answer.documents] == best
    assert list(answer.scores) == [float(len(text)) for text in best]


def test_hits_that_are_none_are_left_out(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searcher = open_searcher(RetrieverSettings(corpus=corpus))
    hits = Hits(np.asarray([[3, NO_ROW], [NO_ROW, NO_ROW]]), np.asarray([[2, -np.inf]] * 2, dtype=np.float32))
    monkeypatch.setattr(searcher._index, "search", lambda queries, k: hits)
    first, second = searcher.search(["a", "b"], 2)
    assert (len(first.documents), first.scores, second) == (1, (2.0,), QueryResult((), ()))


async def test_memory_for_bodies_and_answers_is_bounded(settings: Settings) -> None:
    async with (
        running(settings(max_body_mb=0.1, max_hits=1000)) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        status, answer = await post(session, "/retrieve", {"queries": ["a", "b"], "topk": 501})
        assert status == 400 and "exceed retriever.max_hits = 1000" in answer["error"]
        kind = b"Content-Type: application/json\r\n"
        head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\n" + kind + b"Content-Length: 100000\r\n\r\n"
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in held:
            writer.write(head)
        first = [asyncio.ensure_future(reader.readline()) for reader, _ in held]
        done, waiting = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        # four bodies are waited for, the fifth is refused, small ones are not concerned
        assert [task.result() for task in done] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
        assert (await post(session, "/retrieve", {"queries": ["a"]}))[0] == 200
        for _, writer in held:
            writer.close()
        await asyncio.wait(waiting)
        large = {"queries": ["a"], "ignored": "x" * 90_000}
        for _ in range(100):
            status, _ = await post(session, "/retrieve", large)
            if status == 200:
                break
            await asyncio.sleep(0.01)
        assert status == 200
