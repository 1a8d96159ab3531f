"""The HTTP dialect, with a client in Search-R1's manner and with hostile ones."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from protocol.search import SearchRequest, SearchResponse
from retriever.api import base
from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.api.flashrag import ManyQueries
from retriever.api.search_r1 import render
from retriever.backends.base import QueryResult
from retriever.config import RetrieverSettings
from retriever.server import running
from tests.support.waiting import eventually

Settings = Callable[..., RetrieverSettings]
StartBench = Callable[..., AbstractAsyncContextManager[Any]]


def post(url: str, body: object, raw: bytes | None = None) -> tuple[int, Any, dict[str, str]]:
    """What Search-R1's `requests.post(search_url, json=payload)` does, by the standard library."""
    data = json.dumps(body).encode() if raw is None else raw
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


async def apost(port: int, body: object, raw: bytes | None = None) -> tuple[int, Any, dict[str, str]]:
    return await asyncio.to_thread(post, f"http://127.0.0.1:{port}/retrieve", body, raw)


def search_r1_passages(results: list[Any]) -> str:
    """`_passages2string` of Search-R1's search_r1/llm_agent/generation.py, which is what its trainer does with hits."""
    text = ""
    for number, item in enumerate(results):
        content = item["document"]["contents"]
        title = content.split("\n")[0]
        text += f"Doc {number + 1}(Title: {title}) {chr(10).join(content.split(chr(10))[1:])}\n"
    return text


async def test_a_client_written_like_search_r1s_gets_what_it_reads(settings: Settings) -> None:
    async with running(settings()) as port:
        queries = ["number7 letter", "number8", "number9"]
        status, body, _ = await apost(port, {"queries": queries, "topk": 2, "return_scores": True})
    assert status == 200
    texts = [search_r1_passages(hits) for hits in body["result"]]
    assert texts[0].startswith('Doc 1(Title: "Hopper") Hopper wrote number7 to Ada city.\nDoc 2(Title: "')
    assert all(f"number{7 + i}" in text for i, text in enumerate(texts))
    SearchResponse.model_validate(body)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("scores", [True, False, None])
async def test_any_number_of_queries_with_and_without_scores(
    settings: Settings, count: int, scores: bool | None
) -> None:
    body: dict[str, Any] = {"queries": [f"number{i}" for i in range(count)], "topk": 4}
    if scores is not None:
        body["return_scores"] = scores
    async with running(settings()) as port:
        status, answer, _ = await apost(port, body)
    assert status == 200
    assert list(answer) == ["result"]
    assert [len(hits) for hits in answer["result"]] == [4] * count
    for i, hits in enumerate(answer["result"]):
        documents = [hit["document"] for hit in hits] if scores else hits
        assert documents[0]["id"] == f"d{i}"
        assert all(set(document) == {"id", "contents"} for document in documents)
        if scores:
            values = [hit["score"] for hit in hits]
            assert all(isinstance(value, float) for value in values)
            assert values == sorted(values, reverse=True)


async def test_topk_absent_or_null_is_the_servers_default(settings: Settings) -> None:
    async with running(settings(topk=2)) as port:
        for body in ({"queries": ["Curie"]}, {"queries": ["Curie"], "topk": None}):
            _, answer, _ = await apost(port, body)
            assert len(answer["result"][0]) == 2


async def test_more_hits_than_passages_gives_every_passage_once(settings: Settings) -> None:
    async with running(settings()) as port:
        _, answer, _ = await apost(port, {"queries": ["Curie", "unknown words"], "topk": 1000})
    for hits in answer["result"]:
        assert sorted(document["id"] for document in hits) == sorted(f"d{i}" for i in range(40))


async def test_a_blank_query_gives_an_empty_list_beside_the_others(settings: Settings) -> None:
    async with running(settings()) as port:
        _, answer, _ = await apost(port, {"queries": ["", "number3", "  "], "topk": 1, "return_scores": True})
    assert [len(hits) for hits in answer["result"]] == [0, 1, 0]


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "queries: Field required"),
        (b'{"queries": "one"}', "queries: Input should be a valid list"),
        (b'{"queries": ["a", 3]}', "queries.1: Input should be a valid string"),
        (b'{"queries": ["a"], "topk": -1}', "topk: Input should be greater than or equal to 0"),
        (b'{"queries": ["a"], "return_scores": "perhaps"}', "return_scores: Input should be a valid boolean"),
        (b"[" * 100_000, "Invalid JSON"),
        (json.dumps({"queries": ["a"] * 66_667}).encode(), "exceed the limit of 200000 hits"),
    ],
    ids=range(11),
)
async def test_a_bad_body_is_answered_400_with_the_reason(settings: Settings, raw: bytes, complaint: str) -> None:
    async with running(settings()) as port:
        status, answer, _ = await apost(port, None, raw)
    assert status == 400
    assert complaint in answer["error"]


async def test_a_huge_body_is_refused_and_other_paths_and_methods_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_BODY_BYTES", 10_000)
    async with running(settings()) as port:
        status, answer, _ = await apost(port, {"queries": ["x" * 100] * 200})
        assert (status, list(answer)) == (413, ["error"])
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path, expected in (("/retrieve", 405), ("/nowhere", 404)):
                async with session.get(path) as response:
                    assert response.status == expected
                    assert list(await response.json()) == ["error"]


async def test_passages_can_be_fetched_by_id(settings: Settings) -> None:
    async with running(settings()) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/passages/d11") as response:
            assert (await response.json())["contents"].startswith('"東京"\n')
        async with session.get("/passages/d99") as response:
            assert response.status == 404


async def test_info_and_metrics_describe_the_index_and_the_traffic(settings: Settings) -> None:
    async with running(settings()) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        await apost(port, {"queries": ["Curie", "Curie", ""]})
        await apost(port, None, b"{")
        async with session.get("/info") as response:
            info = await response.json()
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    assert (info["type"], info["passages"], info["topk"], len(info["fingerprint"])) == ("bm25", 40, 3, 16)
    for line in (
        'requests_total{route="/retrieve",status="200"} 1.0',
        'requests_total{route="/retrieve",status="400"} 1.0',
        "queries_total 3.0",
        "blank_queries_total 1.0",
        "deduplicated_total 1.0",
        "searched_total 1.0",
        "passages 40.0",
    ):
        assert f"foray_retriever_{line}" in lines
    assert all(line.startswith(("#", "foray_retriever_")) for line in lines)


async def test_an_overloaded_service_answers_429_and_its_health(bench: StartBench) -> None:
    async with bench(window_ms=0, queue_limit=2, max_batch=1) as b, aiohttp.ClientSession(b.url) as session:
        b.watched.gate.clear()
        held = [asyncio.create_task(session.post("/retrieve", json={"queries": [f"number{i}"]})) for i in range(2)]
        await eventually(lambda: b.count("queue") == 2, "the queue is full")
        async with session.post("/retrieve", json={"queries": ["number5"]}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert "2 queries are queued" in (await response.json())["error"]
        start = time.perf_counter()
        for path in ("/health", "/ready", "/metrics"):
            async with session.get(path) as response:
                assert response.status == 200
        assert time.perf_counter() - start < 2
        b.watched.gate.set()
        for task in held:
            async with await task as response:
                assert response.status == 200
        assert b.count("rejected_total") == b.count("requests_total", route="/retrieve", status="429") == 1


async def test_the_work_of_a_client_that_left_is_dropped(bench: StartBench) -> None:
    async with bench(window_ms=0) as b, aiohttp.ClientSession(b.url) as session:
        b.watched.gate.clear()
        held = asyncio.create_task(session.post("/retrieve", json={"queries": ["number0"]}))
        await eventually(lambda: b.watched.entered == 1, "the owner is busy")
        leaves = asyncio.create_task(session.post("/retrieve", json={"queries": ["number1"]}))
        await eventually(lambda: b.count("queue") == 2, "another waits")
        leaves.cancel()
        await eventually(lambda: b.count("dropped_total") == 1, "it is dropped")
        b.watched.gate.set()
        async with await held as response:
            assert response.status == 200
        assert b.watched.calls == [(["number0"], 3)]
        assert b.count("requests_total", route="/retrieve", status="499") == 1


async def test_a_query_on_which_the_index_fails_is_answered_500(bench: StartBench) -> None:
    async with bench() as b, aiohttp.ClientSession(b.url) as session:
        b.watched.poison = "number1"
        async with session.post("/retrieve", json={"queries": ["number1"]}) as response:
            assert response.status == 500
            assert "poisoned" in (await response.json())["error"]


async def test_many_clients_at_once_all_get_their_own_answers(settings: Settings) -> None:
    async with (
        running(settings(index={"type": "faiss_flat"}, threads=1)) as port,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def ask(i: int) -> bool:
            body = {"queries": [f"number{i % 40}"], "topk": 1}
            async with session.post(f"http://127.0.0.1:{port}/retrieve", json=body) as response:
                return (await response.json())["result"][0][0]["id"] == f"d{i % 40}"

        assert all(await asyncio.gather(*(ask(i) for i in range(300))))


async def test_requests_in_flight_are_answered_when_the_service_ends(settings: Settings) -> None:
    async with running(settings(window_ms=400)) as port:
        asked = asyncio.create_task(apost(port, {"queries": ["number7"]}))
        await asyncio.sleep(0.1)
    status, answer, _ = await asked
    assert (status, answer["result"][0][0]["id"]) == (200, "d7")


async def test_before_the_index_is_open_the_service_is_healthy_and_not_ready(settings: Settings) -> None:
    runner = web.AppRunner(create_app(RetrieverState(settings())), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        status, answer, headers = await apost(port, {"queries": ["number7"]})
        assert (status, answer, headers["Retry-After"]) == (503, {"error": "the index is not open"}, "1")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            expectations = {"/health": 200, "/metrics": 200, "/ready": 503, "/info": 503, "/passages/d1": 503}
            for path, expected in expectations.items():
                async with session.get(path) as response:
                    assert response.status == expected, path
    finally:
        await runner.cleanup()


def test_rendered_bodies_are_the_json_that_they_should_be() -> None:
    answers = [QueryResult((b'{"id":"a"}', b'{"id":"b"}'), (1.5, 1e-07)), QueryResult((), ())]
    assert json.loads(render(answers, scores=True)) == {
        "result": [[{"document": {"id": "a"}, "score": 1.5}, {"document": {"id": "b"}, "score": 1e-07}], []]
    }
    assert json.loads(render(answers, scores=False)) == {"result": [[{"id": "a"}, {"id": "b"}], []]}
    assert json.loads(render([], scores=True)) == {"result": []}


async def test_with_overload_wait_a_full_queue_answers_503(bench: StartBench) -> None:
    fields = {"window_ms": 0, "queue_limit": 1, "max_batch": 1, "overload": "wait", "overload_wait_s": 0.05}
    async with bench(**fields) as b, aiohttp.ClientSession(b.url) as session:
        b.watched.gate.clear()
        held = asyncio.create_task(session.post("/retrieve", json={"queries": ["number1"]}))
        await eventually(lambda: b.count("queue") == 1, "the queue is full")
        async with session.post("/retrieve", json={"queries": ["number5"]}) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
        b.watched.gate.set()
        async with await held as response:
            assert response.status == 200
        assert b.count("rejected_total") == b.count("waited_total") == 1


@pytest.mark.parametrize(
    ("path", "name"), [("/retrieve", "queries"), ("/retrieve", "query"), ("/batch_search", "query")]
)
async def test_a_list_of_a_million_items_costs_no_look_at_each(
    settings: Settings, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_HITS", 1000)
    model = SearchRequest if path == "/retrieve" else ManyQueries
    with pytest.raises(ValidationError) as raised:
        model.model_validate({name: ["a", *[0] * 1000]})
    assert raised.value.error_count() == 1  # each is a record of several hundred bytes
    async with running(settings()) as port:
        for item in (0, ""):
            body = {name: [item] * 1001}
            status, answer, _ = await asyncio.to_thread(post, f"http://127.0.0.1:{port}{path}", body)
            assert status == 400 and answer["error"] == f"{name}: 1001 items exceed the limit of 1000 hits"


async def test_a_request_that_waits_keeps_the_memory_of_its_body_counted(
    bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_BODY_BYTES", 105_000)
    fields = {"window_ms": 0, "queue_limit": 1, "overload": "wait", "overload_wait_s": 60}
    async with bench(**fields) as b, aiohttp.ClientSession(b.url) as session:
        b.watched.gate.clear()
        first = asyncio.create_task(session.post("/retrieve", json={"queries": ["number0"]}))
        await eventually(lambda: b.count("queue") == 1, "the queue is full")
        large = [{"queries": [f"number{i}"] + ["x" * 4000] * 24} for i in range(1, 7)]  # 96 kB of 105 kB
        held = [asyncio.create_task(session.post("/retrieve", json=body)) for body in large]
        await eventually(lambda: b.count("waited_total") + b.count("rejected_total") == 6, "all have come")
        assert (b.count("waited_total"), b.count("rejected_total")) == (4, 2)
        b.watched.gate.set()
        statuses = []
        for task in (first, *held):
            async with await task as response:
                statuses.append(response.status)
        assert sorted(statuses) == [200] * 5 + [503] * 2
        async with session.post("/retrieve", json=large[0]) as response:
            assert response.status == 200  # the memory came back
