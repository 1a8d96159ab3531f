"""The retriever's client against a real HTTP server that behaves as badly as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.search import MAX_QUERY_CHARS
from rollout_server.search.http import HttpSearch, HttpSearchSettings

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
GOOD = {"result": [[{"document": {"id": f"p{i}", "contents": f'"T{i}"\ntext'}, "score": 1.0 - i} for i in range(5)]]}


def say(status: int = 200, body: object = GOOD, after_s: float = 0.0, **headers: str) -> Answer:
    async def answer(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(after_s)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


class Retriever:
    """Answers the n-th request with the n-th of `answers`, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [say()]
        self.asked: list[dict[str, Any]] = []
        self.connections: set[object] = set()
        self.url = ""

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.connections.add(request.transport)
        return await self.answers[min(len(self.asked), len(self.answers)) - 1](request, body)


@pytest.fixture
async def retriever() -> AsyncIterator[Retriever]:
    handler = Retriever()
    app = web.Application()
    app.router.add_post("/retrieve", handler.retrieve)
    async with TestServer(app) as server:
        handler.url = str(server.make_url(""))
        yield handler


@pytest.fixture
async def search(retriever: Retriever) -> AsyncIterator[HttpSearch]:
    service = HttpSearch(HttpSearchSettings(urls=(retriever.url,), deadline_s=2))
    yield service
    await service.close()


async def test_a_query_brings_passages_best_first_and_no_more_than_asked_for(
    retriever: Retriever, search: HttpSearch
) -> None:
    result = await search("emma")
    assert retriever.asked == [{"queries": ["emma"], "topk": 3, "return_scores": True}]
    assert [(p.id, p.title, p.text) for p in result.passages] == [(f"p{i}", f"T{i}", "text") for i in range(3)]
    assert result.error == "" and 0 < result.latency_s < 2


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_busy_or_broken_server_is_asked_again(retriever: Retriever, search: HttpSearch, status: int) -> None:
    retriever.answers = [say(status), say(status), say()]
    assert len((await search("emma")).passages) == 3
    assert len(retriever.asked) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (say(400), "http_400"),
        (say(404), "http_404"),
        (say(302, "", Location="/elsewhere"), "http_302"),
        (say(body="not json"), "garbage"),
        (say(body="[" * 100_000), "garbage"),
        (say(body={"result": []}), "garbage"),
        (say(body={"result": [[], []]}), "garbage"),
        (say(body={"result": [[{"document": {"id": "p"}}]]}), "garbage"),
        (say(body={"result": [[{"id": "p", "contents": "x"}]]}), "garbage"),
        (say(body={"error": "no"}), "garbage"),
        (say(body='"' + "x" * (5 << 20) + '"'), "too_large"),
    ],
)
async def test_a_reply_that_cannot_be_used_has_a_name_and_is_not_asked_for_again(
    retriever: Retriever, search: HttpSearch, answer: Answer, error: str
) -> None:
    retriever.answers = [answer]
    result = await search("emma")
    assert (result.passages, result.error) == ((), error)
    assert len(retriever.asked) == 1


@pytest.mark.parametrize(
    ("answer", "error"), [(say(500), "http_500"), (say(503), "overloaded"), (say(after_s=9), "timeout")]
)
async def test_the_deadline_holds_for_all_attempts_together(retriever: Retriever, answer: Answer, error: str) -> None:
    retriever.answers = [answer]
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), deadline_s=0.5))
    started = time.monotonic()
    result = await search("emma")
    await search.close()
    assert result.error == error
    assert time.monotonic() - started < 5
    assert len(retriever.asked) == 1 if error == "timeout" else len(retriever.asked) >= 2


async def test_retry_after_is_respected_when_the_deadline_allows(retriever: Retriever, search: HttpSearch) -> None:
    retriever.answers = [say(503, Retry_After="1"), say()]
    result = await search("emma")
    assert result.passages and result.latency_s >= 1
    retriever.asked.clear()
    retriever.answers = [say(503, Retry_After="60"), say()]
    assert ((await search("persuasion")).error, len(retriever.asked)) == ("overloaded", 1)


async def test_a_dead_retriever_is_passed_over_for_a_living_one(retriever: Retriever) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
        search = HttpSearch(HttpSearchSettings(urls=(dead, retriever.url), deadline_s=5))
        results = [await search(f"query {i}") for i in range(4)]
        alone = HttpSearch(HttpSearchSettings(urls=(dead,), deadline_s=0.3))
        nothing = await alone("emma")
        await search.close()
        await alone.close()
    assert all(len(r.passages) == 3 for r in results)
    assert (nothing.passages, nothing.error) == ((), "unreachable")


async def test_a_connection_cut_in_the_middle_is_tried_again(retriever: Retriever, search: HttpSearch) -> None:
    async def cut(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"result"')
        assert request.transport is not None
        request.transport.abort()
        return response

    retriever.answers = [cut, say()]
    assert len((await search("emma")).passages) == 3


async def test_equal_queries_in_flight_share_one_request(retriever: Retriever, search: HttpSearch) -> None:
    retriever.answers = [say(after_s=0.1)]
    results = await asyncio.gather(*(search(query) for query in ["emma"] * 5 + ["persuasion"]))
    assert sorted(body["queries"][0] for body in retriever.asked) == ["emma", "persuasion"]
    assert all(len(result.passages) == 3 for result in results)
    await search("emma")
    assert len(retriever.asked) == 3  # nothing is kept: a cache is the retriever's affair


async def test_one_that_no_longer_waits_does_not_take_the_answer_from_another(
    retriever: Retriever, search: HttpSearch
) -> None:
    retriever.answers = [say(after_s=0.2)]
    first, second = (asyncio.create_task(search("emma")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len((await second).passages) == 3 and len(retriever.asked) == 1


async def test_closing_ends_searches_in_flight_with_a_name(retriever: Retriever, search: HttpSearch) -> None:
    retriever.answers = [say(after_s=30)]
    waiting = asyncio.create_task(search("emma"))
    await asyncio.sleep(0.05)
    await search.close()
    assert (await waiting).error == "closed"


async def test_connections_are_kept_and_bounded(retriever: Retriever) -> None:
    retriever.answers = [say(after_s=0.01)]
    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), connections=4, deadline_s=10))
    results = await asyncio.gather(*(search(f"query {i}") for i in range(40)))
    await search.close()
    assert all(not r.error for r in results)
    assert len(retriever.connections) <= 4


async def test_a_query_longer_than_the_protocol_allows_is_cut(retriever: Retriever, search: HttpSearch) -> None:
    assert not (await search("x" * 10 * MAX_QUERY_CHARS)).error
    assert len(retriever.asked[0]["queries"][0]) == MAX_QUERY_CHARS


def test_one_address_may_be_written_without_a_list() -> None:
    assert HttpSearchSettings.model_validate({"urls": "http://a:1/"}).urls == ("http://a:1/",)
