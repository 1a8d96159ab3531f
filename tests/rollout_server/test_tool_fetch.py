"""`fetch` against a real HTTP server with scripted faults."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from protocol.errors import UserError
from rollout_server.tools.base import Tool
from rollout_server.tools.fetch import Fetch, FetchSettings, address

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAGE = {"id": "p7", "contents": '"Author"\nJane Austen.'}
UNKNOWN = {"error": "no passage has this id"}


def say(status: int = 200, body: object = PAGE, after_s: float = 0.0, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(after_s)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


class Retriever:
    """Answers the n-th request with the n-th of `answers`, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [say()]
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""
        self.arrived = asyncio.Semaphore(0)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.raw_path, request.query.get("id")))
        self.arrived.release()
        return await self.answers[min(len(self.asked), len(self.answers)) - 1](request)


@pytest.fixture
async def retriever() -> AsyncIterator[Retriever]:
    handler = Retriever()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler.handle)
    async with TestServer(app) as server:
        handler.url = str(server.make_url(""))
        yield handler


@pytest.fixture
async def fetch(retriever: Retriever) -> AsyncIterator[Tool]:
    tool = Fetch(FetchSettings(urls=(retriever.url,), deadline_s=2), ())
    yield tool
    await tool.close()


async def test_an_id_returns_its_document(retriever: Retriever, fetch: Tool) -> None:
    result = await fetch(" p7 \n")
    assert retriever.asked == [("/passages/p7", None)]
    assert [(p.id, p.title, p.text) for p in result.passages] == [("p7", "Author", "Jane Austen.")]
    assert (result.error, result.mistake) == ("", "") and 0 < result.latency_s < 2


async def test_a_lone_surrogate_in_a_document_is_replaced(retriever: Retriever, fetch: Tool) -> None:
    retriever.answers = [say(body=PAGE | {"contents": '"A"\nb\ud83dc'})]
    result = await fetch("p7")
    assert [p.text for p in result.passages] == ["b\ufffdc"] and not result.error


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("a b&c=d?e#f%2f;g", "/passages/a%20b%26c%3Dd%3Fe%23f%252f%3Bg"),
        ("é\u2603", "/passages/%C3%A9%E2%98%83"),
        ("https://evil.example/x?y=1", "/passages?id=https%3A%2F%2Fevil.example%2Fx%3Fy%3D1"),
        ("../admin", "/passages?id=..%2Fadmin"),
        ("..", "/passages?id=.."),
        (".", "/passages?id=."),
        ("@evil.example:80", "/passages/%40evil.example%3A80"),
        ("x\r\nHost: evil", "/passages?id=x%0D%0AHost%3A%20evil"),
        ("\\\\evil\\x", "/passages/%5C%5Cevil%5Cx"),
    ],
)
async def test_what_a_policy_writes_is_only_ever_one_quoted_name(
    retriever: Retriever, fetch: Tool, name: str, path: str
) -> None:
    retriever.answers = [say(body={"id": name, "contents": "t\nx"})]
    assert [p.id for p in (await fetch(name)).passages] == [name]
    assert [asked for asked, _ in retriever.asked] == [path]
    if "?" in path:
        assert retriever.asked[0][1] == name, "and the server reads it as it was"
    assert address("http://h/passages", name) == "http://h" + path


async def test_an_unknown_id_is_the_policys_mistake_and_not_asked_again(retriever: Retriever, fetch: Tool) -> None:
    retriever.answers = [say(404, UNKNOWN)]
    result = await fetch("p9")
    assert (result.error, result.mistake, result.passages) == ("", "unknown_id", ())
    assert "no document" in result.text and len(retriever.asked) == 1
    for nonsense in ("", " ", "x" * 2000):
        assert (await fetch(nonsense)).mistake == "unknown_id"
    assert len(retriever.asked) == 1, "nothing that cannot be an id is asked for"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_busy_or_broken_server_is_asked_again(retriever: Retriever, fetch: Tool, status: int) -> None:
    retriever.answers = [say(status), say(status), say()]
    assert len((await fetch("p7")).passages) == 1
    assert len(retriever.asked) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (say(400), "http_400"),
        (say(302, "", Location="/elsewhere"), "http_302"),
        (say(404, "<html>Not Found</html>"), "garbage"),
        (say(404, ["error"]), "garbage"),
        (say(body="not json"), "garbage"),
        (say(body="[" * 100_000), "garbage"),
        (say(404, "[" * 100_000), "garbage"),
        (say(body={"contents": "without an id"}), "garbage"),
        (say(body={"id": "another", "contents": "x"}), "garbage"),
        (say(body='"' + "x" * (5 << 20) + '"'), "too_large"),
    ],
)
async def test_a_reply_that_cannot_be_used_has_a_name_and_is_not_asked_for_again(
    retriever: Retriever, fetch: Tool, answer: Answer, error: str
) -> None:
    retriever.answers = [answer]
    result = await fetch("p7")
    assert (result.passages, result.error, result.mistake) == ((), error, "")
    assert len(retriever.asked) == 1


@pytest.mark.parametrize(
    ("answer", "error"), [(say(500), "http_500"), (say(503), "overloaded"), (say(after_s=9), "timeout")]
)
async def test_the_deadline_holds_for_all_attempts_together(retriever: Retriever, answer: Answer, error: str) -> None:
    retriever.answers = [answer]
    fetch = Fetch(FetchSettings(urls=(retriever.url,), deadline_s=0.4), ())
    started = time.monotonic()
    result = await fetch("p7")
    await fetch.close()
    assert result.error == error and time.monotonic() - started < 5


async def test_a_retry_goes_to_the_next_retriever(retriever: Retriever) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"http://127.0.0.1:{server.getsockname()[1]}"
    fetch = Fetch(FetchSettings(deadline_s=5), (dead, retriever.url))
    for _ in range(2):
        assert (await fetch("p7")).error == ""
    await fetch.close()
    only_dead = Fetch(FetchSettings(deadline_s=0.3, outage_wait_s=0), (dead,))
    assert (await only_dead("p7")).error == "unreachable"
    await only_dead.close()


async def test_a_retriever_that_is_away_longer_than_the_deadline_costs_time_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fetch = Fetch(FetchSettings(deadline_s=0.2, outage_wait_s=20), (f"http://127.0.0.1:{port}",))
    call = asyncio.create_task(fetch("p7"))
    await asyncio.sleep(0.4)
    assert not call.done()
    handler = Retriever()
    app = web.Application()
    app.router.add_get("/{rest:.*}", handler.handle)
    async with TestServer(app, port=port), asyncio.timeout(10):
        result = await call
    assert result.error == "" and result.passages[0].id == "p7"
    await fetch.close()


async def test_a_long_document_is_cut(retriever: Retriever) -> None:
    retriever.answers = [say(body={"id": "p7", "contents": '"t"\n' + "x" * 10_000})]
    fetch = Fetch(FetchSettings(urls=(retriever.url,), max_chars=100), ())
    assert len((await fetch("p7")).passages[0].contents) == 100
    await fetch.close()


async def test_closing_ends_calls_in_flight_and_a_cancelled_call_stays_cancelled(retriever: Retriever) -> None:
    retriever.answers = [say(after_s=60)]
    fetch = Fetch(FetchSettings(urls=(retriever.url,)), ())
    first, second = asyncio.create_task(fetch("p7")), asyncio.create_task(fetch("p7"))
    async with asyncio.timeout(5):
        await asyncio.gather(retriever.arrived.acquire(), retriever.arrived.acquire())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await fetch.close()
    assert (await second).error == "closed"


def test_documents_come_from_where_searches_go_unless_settings_say_otherwise() -> None:
    Fetch(FetchSettings(), ("http://127.0.0.1:1",))
    with pytest.raises(UserError, match="has no retriever"):
        Fetch(FetchSettings(), None)


async def test_documents_come_from_the_retrievers_registered_now(retriever: Retriever) -> None:
    registered: list[str] = []
    fetch = Fetch(FetchSettings(outage_wait_s=0.0, deadline_s=0.2), registered)
    assert (await fetch("p7")).error == "unreachable", "none yet"
    registered.append(retriever.url)
    assert (await fetch("p7")).passages
    await fetch.close()
